import gcore


def right(record):
    return float(record.prompt.fields["answer"] in ("2", b"2"))


if __name__ == "__main__":
    rows = [{"prompt": "1+1=", "answer": b"2"}, {"prompt": "2+0=", "answer": b"2"}]
    gcore.train(
        model={"make": {"path": "make.py", "name": "make"}},
        data=rows,
        reward=right,
        run__steps=1,
        controller__config__prompts=2,
        advantage__config__group_size=2,
    )
