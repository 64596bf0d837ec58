"use strict";

// A run that goes on: each step is added to the curves as it comes; other panels have a button.
const Live = (() => {
  const REDRAW_MS = 1000;  // charts are drawn at most so often

  function follow({ panels, renew, showRuns }) {
    const state = document.getElementById("state");
    const run = Data.head.runs[0];
    let isWaiting = false;
    const source = new EventSource("events");
    source.addEventListener("step", (event) => {
      const row = JSON.parse(event.data);
      run.finished = row.step;
      run.end_unix_s = row.time_unix_s;
      if (!run.start_unix_s) run.start_unix_s = row.time_unix_s;
      const isKnown = Curves.add(row);
      if (isWaiting) return;
      isWaiting = true;
      setTimeout(() => {
        isWaiting = false;
        showRuns();
        if (isKnown) Curves.refresh();
        else ["curves", "placement", "balance", "memory"].forEach(renew);
      }, REDRAW_MS);
    });
    source.addEventListener("state", (event) => {
      const { alive } = JSON.parse(event.data);
      state.textContent = alive ? "live" : "not running";
      state.classList.toggle("ended", !alive);
    });
    source.addEventListener("again", () => location.reload());
    source.addEventListener("error", () => {
      state.textContent = "no connection";
      state.classList.add("ended");
    });
    document.getElementById("renew").addEventListener("click", () => panels.forEach(renew));
    button("save", "save");
    button("stop", "stop", "Save the state of the run and end it?");
  }

  function button(id, action, question = "") {
    document.getElementById(id).addEventListener("click", async () => {
      if (question && !confirm(question)) return;
      const said = document.getElementById("said");
      try {
        said.textContent = await (await fetch(action, { method: "POST" })).text();
      } catch {
        said.textContent = "There is no connection to g-core watch.";
      }
    });
  }

  return { follow };
})();
