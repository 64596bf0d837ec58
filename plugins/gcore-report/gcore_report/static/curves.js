"use strict";

// Curves of all metrics: a card for each, in groups.
const Curves = (() => {
  const OF_PANELS = ["Balance", "Placement", "Memory", "Processor time"];
  const settings = { smooth: 1 / 30, log: false };
  let cards = [];
  const linesOfKey = new Map();  // of the first run, to which a live run adds

  function show(panel, data) {
    cards = cards.filter(({ element }) => element.isConnected);  // those of other panels
    linesOfKey.clear();
    for (const line of data.flatMap((group) => group.charts).flatMap((chart) => chart.lines)) {
      if (line.run === 0) linesOfKey.set(line.key, [...(linesOfKey.get(line.key) || []), line]);
    }
    const search = make("input", { type: "search", placeholder: "part of a name", "data-search": true });
    search.addEventListener("input", () => filter(panel, search.value.toLowerCase()));
    const smoothing = choice([["0", "none"], ["0.0333", "light"], ["0.1", "strong"]]);
    smoothing.value = "0.0333";
    smoothing.addEventListener("change", () => change({ smooth: Number(smoothing.value) }));
    const log = make("input", { type: "checkbox" });
    log.addEventListener("change", () => change({ log: log.checked }));
    const tools = [field("Metric", search), field("Smoothing", smoothing), field("Log scale", log)];
    panel.append(make("div", { class: "tools" }, ...tools));
    if (!data.length) panel.append(nothing("No step is finished yet."));
    for (const group of data) {
      if (!OF_PANELS.includes(group.title)) panel.append(groupOf(group));
    }
    panel.append(rule(
      "A pale line has every step, a full one the moving mean. Of more than 1,000 steps, the lowest and "
      + "the highest value of each span of steps are drawn. Drag over a chart to zoom, click twice to go back."));
  }

  function groupOf(group) {
    const own = group.charts.map(cardOf);
    const grid = make("div", { class: "grid" }, ...own);
    const title = make("summary", {}, make("h2", {}, group.title));
    return make("details", { open: !group.closed, class: "group" }, title, grid);
  }

  // The groups of these titles, for panels that show more about the same thing.
  async function groups(panel, titles) {
    const data = await Data.load("curves");
    const own = data.filter((group) => titles.includes(group.title));
    panel.append(...own.map((group) => make("div", { class: "grid" }, ...group.charts.map(cardOf))));
    return own.length;
  }

  function cardOf(chart) {
    const title = chart.key.replace("evaluation:", "held-out ");
    const element = make("div", {});
    const card = make("figure", { class: "card", "data-key": title.toLowerCase() },
      make("figcaption", {}, title), element);
    const build = () => ({ traces: tracesOf(chart), layout: layoutOf(chart) });
    cards.push({ element, build, chart });
    Charts.lazy(element, build);
    return card;
  }

  function layoutOf(chart) {
    const values = chart.lines.flatMap((line) => line.y);
    const isShare = chart.group !== "Time" && values.every((value) => value >= 0 && value <= 1)
      && values.some((value) => value > 0.2);
    const yaxis = { type: settings.log ? "log" : "linear" };
    if (isShare && !settings.log) yaxis.range = [-0.03, 1.03];
    return {
      showlegend: chart.lines.some((line) => line.name),
      hovermode: "x unified",
      xaxis: { title: { text: "step", standoff: 4 } },
      yaxis,
    };
  }

  function tracesOf(chart) {
    const names = [...new Set(chart.lines.map((line) => line.name))];
    const byRun = Data.head.runs.length > 1 && names.length <= 2;
    return chart.lines.flatMap((line) => {
      const name = names.indexOf(line.name);
      const style = byRun
        ? { color: Charts.colour(line.run), dash: Charts.dash(name) }
        : { color: Charts.colour(name), dash: Charts.dash(line.run) };
      const isFirst = chart.lines.find((each) => each.name === line.name) === line;
      return linesOf(chart, line, style, !byRun || isFirst);
    });
  }

  // Colours of runs stand in the head of the page, so a legend names what differs within a run.
  function linesOf(chart, line, style, showlegend) {
    const base = {
      x: line.x, y: line.y, type: "scatter", name: Charts.plain(line.name), showlegend, line: { ...style, width: 1.8 },
      hovertemplate: `${Charts.plain(nameOf(line))} %{y:.5~g}<extra></extra>`,
    };
    if (chart.stacked) return [{ ...base, stackgroup: `run ${line.run}`, mode: "lines" }];
    const reach = Math.floor(line.y.length * settings.smooth / 2);
    if (line.y.length < 20) return [{ ...base, mode: "lines+markers" }];
    if (!reach) return [{ ...base, mode: "lines" }];
    return [
      { ...base, mode: "lines", opacity: 0.25, line: { ...style, width: 1 }, showlegend: false, hoverinfo: "skip" },
      { ...base, mode: "lines", y: smoothed(line.y, reach) },
    ];
  }

  function nameOf(line) {
    const run = Data.head.runs.length > 1 ? Data.head.runs[line.run].label : "";
    return [line.name, run].filter(Boolean).join(" ");
  }

  // The mean of each value and of so many neighbours on both sides.
  function smoothed(values, reach) {
    const sums = [0];
    for (const value of values) sums.push(sums[sums.length - 1] + value);
    return values.map((_, i) => {
      const first = Math.max(0, i - reach);
      const end = Math.min(values.length, i + reach + 1);
      return (sums[end] - sums[first]) / (end - first);
    });
  }

  function filter(panel, text) {
    for (const group of panel.querySelectorAll(".group")) {
      let some = false;
      for (const card of group.querySelectorAll(".card")) {
        card.hidden = !card.dataset.key.includes(text);
        some ||= !card.hidden;
      }
      group.hidden = !some;
      if (text && some) group.open = true;
    }
  }

  function change(values) {
    Object.assign(settings, values);
    for (const { element, build } of cards) Charts.redraw(element, build);
  }

  // Adds a step of a live run; returns false for a metric that has no chart yet.
  function add(row) {
    let known = true;
    const values = Object.entries(row.metrics)
      .concat(Object.entries(row.evaluation || {}).map(([key, value]) => [`evaluation:${key}`, value]));
    for (const [key, value] of values) {
      if (value !== null) known = addValue(key, row.step, value) && known;
    }
    return known;
  }

  function addValue(key, step, value) {
    const lines = linesOfKey.get(key) || [];
    for (const line of lines) {
      if (line.x.length && line.x[line.x.length - 1] >= step) continue;
      line.x.push(step);
      line.y.push(value);
    }
    return lines.length > 0;
  }

  function refresh() {
    for (const { element, build } of cards) Charts.redraw(element, build);
  }

  return { add, groups, refresh, show };
})();
