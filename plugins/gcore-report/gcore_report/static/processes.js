"use strict";

// The panels about processes: timeline, placement, balance and memory.
const Processes = (() => {
  const STAGES = ["generation", "rewards", "rollout", "prepare", "train", "push", "evaluation"];

  // A card over the whole width, with a chart of that many pixels.
  function wide(title, height, build) {
    const element = Charts.lazy(make("div", { style: `height:${height}px` }), build);
    return make("figure", { class: "card wide" }, make("figcaption", {}, title), element);
  }

  const heightOf = (rows) => Math.min(1200, 110 + 26 * Math.max(rows, 2));

  // -- timeline -------------------------------------------------------------------------------------

  function timeline(panel, data) {
    panel.append(rule(data.rule));
    for (const run of data.runs) {
      panel.append(make("h2", {}, run.label));
      if (!run.bars.length) {
        panel.append(nothing("This run has no trace yet."));
        continue;
      }
      panel.append(
        wide("The last steps", heightOf(run.processes.length), () => barsOf(run)),
        wide("Busy, or idle and why", heightOf(Object.keys(run.idle).length), () => idleOf(run, data.causes)));
    }
  }

  function barsOf(run) {
    const kinds = [...new Set([...STAGES, ...run.bars.map((bar) => bar[1])])];
    const traces = kinds.map((kind, i) => {
      const own = run.bars.filter((bar) => bar[1] === kind);
      return {
        type: "bar", orientation: "h", name: kind,
        y: own.map((bar) => bar[0]),
        base: own.map((bar) => bar[3]),
        x: own.map((bar) => bar[4] - bar[3]),
        text: own.map((bar) => `step ${bar[2]}: ${number(bar[4] - bar[3])} s`),
        textposition: "none",
        hovertemplate: "%{y}, %{text}",
        marker: { color: Charts.colour(i) },
      };
    }).filter((trace) => trace.y.length);
    const order = [...run.processes].reverse();
    return {
      traces,
      layout: {
        barmode: "overlay", bargap: 0.3, dragmode: "pan",
        xaxis: { title: { text: "seconds" } },
        yaxis: { categoryorder: "array", categoryarray: order },
      },
    };
  }

  function idleOf(run, causes) {
    const names = Object.keys(run.idle).reverse();
    const whole = names.map((name) =>
      run.busy_s[name] + Object.values(run.idle[name]).reduce((sum, value) => sum + value, 0));
    const share = (seconds) => seconds.map((value, i) => 100 * value / (whole[i] || 1));
    const bar = (name, seconds, color) => ({
      type: "bar", orientation: "h", name, y: names, x: share(seconds),
      customdata: seconds, hovertemplate: "%{y}: %{x:.1f}%, %{customdata:.3g} s", marker: { color },
    });
    const traces = [bar("busy", names.map((name) => run.busy_s[name]), "#009E73")];
    const greys = ["#D55E00", "#E69F00", "#0072B2", "#CC79A7", "#56B4E9", "#7F7F7F"];
    causes.forEach((cause, i) => {
      const seconds = names.map((name) => run.idle[name][cause] || 0);
      if (seconds.some((value) => value > 0)) traces.push(bar(cause, seconds, greys[i % greys.length]));
    });
    const xaxis = { title: { text: `% of ${run.steps.toLocaleString("en")} steps` }, range: [0, 100] };
    return { traces, layout: { barmode: "stack", bargap: 0.3, xaxis } };
  }

  // -- placement ------------------------------------------------------------------------------------

  async function placement(panel, data) {
    panel.append(rule(data.rule));
    for (const run of data.runs) {
      panel.append(make("h2", {}, run.label));
      if (run.moves) {
        panel.append(
          wide("Which role is awake on which device", heightOf(run.devices.length), () => devicesOf(run)),
          wide("Seconds of a rollout", 260, () => secondsOf(run)));
      } else {
        panel.append(nothing("Nothing moved: every process kept its device. When each was there:"));
        panel.append(wide("Processes, by step", heightOf(run.lives.length), () => livesOf(run)));
      }
    }
    await Curves.groups(panel, ["Placement"]);
  }

  function devicesOf(run) {
    const last = Math.max(1, run.roles.length - 1);
    const scale = run.roles.length > 1
      ? run.roles.flatMap((_, i) => {
        const n = run.roles.length;
        return [[i / n, Charts.colour(i)], [(i + 1) / n, Charts.colour(i)]];
      })
      : [[0, Charts.colour(0)], [1, Charts.colour(0)]];
    const text = run.z.map((row) => row.map((role, i) => {
      const name = role === null ? "nobody" : run.roles[role];
      return Charts.plain(`${name}${run.reasons[i] ? `: ${run.reasons[i]}` : ""}`);
    }));
    const trace = {
      type: "heatmap", x: run.steps, y: run.devices.map((device) => `device ${device}`), z: run.z,
      text, zmin: -0.5, zmax: run.roles.length > 1 ? last + 0.5 : 0.5, colorscale: scale, xgap: 0.5, ygap: 2,
      hovertemplate: "step %{x}, %{y}: %{text}<extra></extra>",
      colorbar: { tickvals: run.roles.map((_, i) => i), ticktext: run.roles, thickness: 12 },
    };
    return { traces: [trace], layout: { xaxis: { title: { text: "step" } } } };
  }

  function secondsOf(run) {
    const traces = Object.entries(run.seconds).map(([name, y], i) => ({
      type: "scatter", mode: "lines", name, x: run.steps, y, line: { color: Charts.colour(i) },
    })).filter((trace) => trace.y.some((value) => value !== null));
    return { traces, layout: { hovermode: "x unified", xaxis: { title: { text: "step" } }, yaxis: { rangemode: "tozero" } } };
  }

  function livesOf(run) {
    const names = run.lives.map((life) => life[0]);
    const trace = {
      type: "bar", orientation: "h", y: names, base: run.lives.map((life) => life[1]),
      x: run.lives.map((life) => Math.max(0.5, life[2] - life[1])),
      customdata: run.lives.map((life) => life[2]),
      hovertemplate: "%{y}: step %{base} to %{customdata}<extra></extra>",
      marker: { color: names.map((name) => Charts.colour(["policy", "rollout", "scorer", "controller"].indexOf(name.split(".")[0]) + 1)) },
    };
    return { traces: [trace], layout: { xaxis: { title: { text: "step" } }, yaxis: { autorange: "reversed" } } };
  }

  // -- balance and memory ---------------------------------------------------------------------------

  async function balance(panel, data) {
    panel.append(rule(data.rule));
    for (const run of data.runs) {
      panel.append(make("h2", {}, run.label));
      if (run.z.length) panel.append(wide("Processor seconds of a step", heightOf(run.y.length), () => workOf(run)));
      else panel.append(nothing("No step is finished yet."));
    }
    await Curves.groups(panel, ["Balance"]);
  }

  function workOf(run) {
    const trace = {
      type: "heatmap", x: run.x, y: run.y, z: run.z, colorscale: "Viridis", ygap: 2, zmin: 0,
      hovertemplate: "%{y}, step %{x}: %{z:.3g} s<extra></extra>", colorbar: { thickness: 12, title: { text: "s" } },
    };
    return { traces: [trace], layout: { xaxis: { title: { text: "step" } }, yaxis: { autorange: "reversed" } } };
  }

  async function memory(panel, data) {
    panel.append(rule(data.rule));
    for (const run of data.runs) {
      panel.append(make("h2", {}, run.label));
      if (run.processes.length) panel.append(wide("Largest memory", heightOf(run.processes.length), () => largestOf(run)));
      else panel.append(nothing("No step is finished yet."));
    }
    await Curves.groups(panel, ["Memory"]);
  }

  function largestOf(run) {
    const trace = {
      type: "bar", orientation: "h", y: run.processes, x: run.mib, marker: { color: Charts.colour(0) },
      texttemplate: "%{x:,.0f} MiB", textposition: "auto", hovertemplate: "%{y}: %{x:,.1f} MiB<extra></extra>",
    };
    return { traces: [trace], layout: { xaxis: { title: { text: "MiB" } }, yaxis: { autorange: "reversed" } } };
  }

  return { balance, memory, placement, timeline, wide };
})();
