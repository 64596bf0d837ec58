"use strict";

// Tabs, theme and keys. A panel is made when it is opened first.
(() => {
  const SHOW = {
    curves: Curves.show,
    answers: Answers.show,
    tokens: Tokens.show,
    pictures: Pictures.show,
    timeline: Processes.timeline,
    placement: Processes.placement,
    balance: Processes.balance,
    memory: Processes.memory,
    configuration: Configuration.show,
  };
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const nameOf = (tab) => tab.id.replace("tab-", "");

  function showRuns() {
    const items = Data.head.runs.map((run, i) => {
      const mark = make("span", { class: "mark", style: `background:${Charts.colour(i)}` });
      const steps = `${run.finished.toLocaleString("en")} of ${run.steps.toLocaleString("en")} steps`;
      return make("li", { title: run.directory }, Data.head.runs.length > 1 ? mark : null,
        make("b", {}, run.label), ` ${steps}, ${duration(run.end_unix_s - run.start_unix_s)}`);
    });
    document.getElementById("runs").replaceChildren(...items);
  }

  function duration(seconds) {
    const hours = Math.floor(seconds / 3600);
    const minutes = Math.floor(seconds / 60) % 60;
    return hours ? `${hours} h ${minutes} min` : minutes ? `${minutes} min ${Math.floor(seconds % 60)} s` : `${Math.round(seconds)} s`;
  }

  async function open(name, focus = false) {
    for (const tab of tabs) {
      const isOwn = nameOf(tab) === name;
      tab.setAttribute("aria-selected", String(isOwn));
      tab.tabIndex = isOwn ? 0 : -1;
      document.getElementById(`panel-${nameOf(tab)}`).hidden = !isOwn;
      if (isOwn && focus) tab.focus();
    }
    history.replaceState(null, "", `#${name}`);
    const panel = document.getElementById(`panel-${name}`);
    if (panel.dataset.state) return;
    panel.dataset.state = "loading";
    await SHOW[name](panel, await Data.load(name));
    panel.dataset.state = "ready";
  }

  function keys(event) {
    const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    const place = tabs.findIndex((tab) => tab.getAttribute("aria-selected") === "true");
    if (event.target.role === "tab" && ["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) {
      const next = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: tabs.length - 1 }[event.key];
      event.preventDefault();
      open(nameOf(tabs[(next + tabs.length) % tabs.length]), true);
    } else if (!isTyping && !event.ctrlKey && !event.metaKey && !event.altKey) {
      if (event.key === "/") {
        event.preventDefault();
        document.querySelector("[role=tabpanel]:not([hidden]) [data-search]")?.focus();
      } else if (/^[1-9]$/.test(event.key) && tabs[event.key - 1]) {
        open(nameOf(tabs[event.key - 1]), true);
      }
    }
  }

  function changeTheme() {
    const root = document.documentElement;
    const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
    const now = root.dataset.theme || (isDark ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    Charts.repaint();
  }

  // Makes a panel anew, with what the run has written since.
  function renew(name) {
    const panel = document.getElementById(`panel-${name}`);
    if (!panel.dataset.state) return;
    Data.forget(name);
    delete panel.dataset.state;
    panel.replaceChildren();
    if (!panel.hidden) open(name);
  }

  showRuns();
  for (const tab of tabs) tab.addEventListener("click", () => open(nameOf(tab)));
  document.addEventListener("keydown", keys);
  document.getElementById("theme").addEventListener("click", changeTheme);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => Charts.repaint());
  const asked = location.hash.slice(1);
  open(asked in SHOW ? asked : "curves");
  if (Data.head.live) Live.follow({ panels: Object.keys(SHOW), renew, showRuns });
})();
