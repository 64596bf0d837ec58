from gcore_testing.fake import *  # noqa: F403  hooks are found by their names
