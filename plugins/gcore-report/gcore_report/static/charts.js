"use strict";

// How all charts look, and when they are drawn: a chart is drawn when it comes into sight.
const Charts = (() => {
  // Okabe and Ito's palette, which colour-blind readers can tell apart; the last two are for more.
  const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#8C6BB1", "#7F7F7F"];
  const DASHES = ["solid", "dash", "dot", "dashdot"];
  const CONFIG = {
    displaylogo: false,
    responsive: true,
    modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]],
  };
  const drawn = new Set();
  const waiting = new Map();
  const observer = new IntersectionObserver(see, { rootMargin: "40px" });

  const colour = (i) => COLOURS[i % COLOURS.length];
  const dash = (i) => DASHES[i % DASHES.length];

  // Plotly reads tags and patterns in texts; texts of people and of models have to stay texts.
  function plain(text) {
    return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll("%{", "% {");
  }

  // A colour of the style sheet, as it is in the theme that is shown.
  function themed(name) {
    const probe = make("span", { class: `colour-${name}` });
    document.body.append(probe);
    const value = getComputedStyle(probe).color;
    probe.remove();
    return value;
  }

  function look() {
    const axis = { gridcolor: themed("grid"), zerolinecolor: themed("grid"), linecolor: themed("grid") };
    return {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: themed("text"), family: "system-ui, sans-serif", size: 12 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: themed("quiet"), activecolor: themed("text") },
      hoverlabel: { bgcolor: themed("card"), font: { color: themed("text") }, namelength: -1 },
      axis,
    };
  }

  // To find room for labels, a chart is laid out twice: only wide ones have long labels.
  function layout(own, automargin) {
    const { axis, ...rest } = look();
    const whole = {
      ...rest,
      uirevision: "kept",  // a zoom stays when values are added
      margin: { l: 56, r: 16, t: 8, b: 36 },
      hovermode: "closest",
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, traceorder: "normal" },
      ...own,
    };
    whole.xaxis = { ...axis, automargin, ...own.xaxis };
    whole.yaxis = { ...axis, automargin, ...own.yaxis };
    return whole;
  }

  // Draws a chart into an element as soon as it is seen. `build` returns {traces, layout}.
  function lazy(element, build) {
    element.classList.add("chart");
    waiting.set(element, build);
    observer.observe(element);
    return element;
  }

  function see(entries) {
    for (const { isIntersecting, target } of entries) {
      const build = waiting.get(target);
      if (!isIntersecting || !build) continue;
      observer.unobserve(target);
      draw(target, build);
    }
  }

  async function draw(element, build) {
    waiting.set(element, build);
    const { traces, layout: own } = build();
    // Small charts have no buttons: to drag zooms, and a double click shows the whole again.
    const isWide = Boolean(element.closest(".wide"));
    await Plotly.react(element, traces, layout(own, isWide), { ...CONFIG, displayModeBar: isWide ? "hover" : false });
    drawn.add(element);
    element.dataset.drawn = "true";
  }

  // Draws again what is in sight; anything else when it comes into sight.
  function redraw(element, build) {
    waiting.set(element, build);
    observer.unobserve(element);
    observer.observe(element);  // it tells at once what is in sight
  }

  function repaint() {
    for (const element of drawn) {
      if (element.isConnected) redraw(element, waiting.get(element));
      else drawn.delete(element);
    }
  }

  return { colour, dash, lazy, plain, redraw, repaint };
})();
