"use strict";

// The configuration of all runs side by side, with where each value was set.
const Configuration = (() => {
  function show(panel, data) {
    const labels = Data.head.runs.map((run) => run.label);
    const search = make("input", { type: "search", placeholder: "key, value or origin", "data-search": true });
    const which = choice([["all", "all keys"], ["set", "set by the job"], ["differ", "different between the runs"]]);
    if (labels.length < 2) which.lastElementChild.remove();
    const body = make("tbody");
    const update = () => fill(body, data.rows, search.value.toLowerCase(), which.value);
    search.addEventListener("input", update);
    which.addEventListener("change", update);
    panel.append(make("div", { class: "tools" }, field("Search", search), field("Show", which)));
    const heads = labels.flatMap((label) => [label, "set by"]);
    panel.append(table(["key", ...heads], body));
    update();
    panel.append(make("h2", {}, "Plugins"), table(["plugin", ...labels], rowsOf(data.plugins)));
    panel.append(make("h2", {}, "What it ran on"), table(["", ...labels], rowsOf(data.ran_on)));
  }

  function table(heads, body) {
    const head = make("thead", {}, make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text))));
    return make("div", { class: "scrolled" }, make("table", {}, head, body));
  }

  function rowsOf(rows) {
    return make("tbody", {}, ...rows.map(([name, values]) =>
      make("tr", { class: differ(values) ? "differs" : null },
        make("th", { scope: "row" }, name), ...values.map((value) => make("td", {}, value ?? "-")))));
  }

  const differ = (values) => values.some((value) => value !== values[0]);
  const isDefault = (origin) => origin.startsWith("default of") || origin === "not recorded";

  function fill(body, rows, text, which) {
    body.replaceChildren(...rows.filter(([key, values, origins]) => {
      if (which === "differ" && !differ(values)) return false;
      if (which === "set" && origins.every(isDefault)) return false;
      return !text || [key, ...values, ...origins].some((part) => part !== null && part.toLowerCase().includes(text));
    }).map(rowOf));
    if (!body.children.length) body.append(make("tr", {}, make("td", { colspan: 3 }, "Nothing matches.")));
  }

  function rowOf([key, values, origins]) {
    const cells = values.flatMap((value, i) => [
      make("td", { class: "value" }, value ?? "-"),
      make("td", { class: isDefault(origins[i]) ? "origin quiet" : "origin" }, value === null ? "" : origins[i]),
    ]);
    return make("tr", { class: differ(values) ? "differs" : null }, make("th", { scope: "row" }, key), ...cells);
  }

  return { show };
})();
