"use strict";

// Trained records token by token, coloured by what is asked.
const Tokens = (() => {
  // A log-prob that was NaN or infinite is null, which would count as 0.
  const gapOf = (record, i) =>
    record.trainer[i] === null || record.rollout[i] === null ? NaN : record.trainer[i] - record.rollout[i];
  // What a token may be coloured by: its value, and a name of the value for people.
  const BY = {
    gap: { title: "gap, trainer - generator", of: gapOf, signed: true },
    ratio: { title: "ratio, trainer over generator", of: (record, i) => Math.exp(gapOf(record, i)), middle: 1, signed: true },
    rollout: { title: "log-prob of the generator", of: (record, i) => record.rollout[i] },
    trainer: { title: "log-prob of the trainer", of: (record, i) => record.trainer[i] },
    entropy: { title: "entropy", of: (record, i) => record.entropy[i] },
    advantage: { title: "advantage of the record", of: (record) => record.advantage, signed: true },
  };
  const PAGE = 100;  // records that are offered at once
  const WAIT_MS = 150;  // for the next letter of a search
  let texts = {};  // of the record that is shown: id -> text

  async function show(panel, data) {
    const source = Sources.tokens(data);
    const { steps, total, sentence } = source.facts;
    panel.append(rule(sentence));
    if (!total) {
      panel.append(nothing("This run has written no tokens: it has no sentinel, its actions are no tokens, or its first step is not over."));
      return;
    }
    const search = make("input", { type: "search", placeholder: "in names and answers", "data-search": true });
    const step = choice([["", "all"], ...steps.map((each) => [String(each), String(each)])]);
    const record = choice([]);
    const by = choice(Object.entries(BY).map(([name, kind]) => [name, kind.title]));
    by.value = "trainer";
    const earlier = make("button", { type: "button" }, "Earlier");
    const later = make("button", { type: "button" }, "Later");
    const count = make("output", { "aria-live": "polite" });
    const view = make("div", {});
    let items = [];
    let start = 0;
    let asked = 0;  // number of the last request: an earlier one that ends later shows nothing
    let shown = null;

    const tried = async (work) => {
      const own = ++asked;
      try {
        await work(() => own === asked);
      } catch (error) {
        if (own === asked) view.replaceChildren(nothing(`It could not be read: ${error.message}`));
      }
    };
    const paint = () => {
      if (shown) fill(view, shown, by.value);
    };
    const open = () => tried(async (isLast) => {
      const read = await source.read(items[record.value].key);
      if (!isLast()) return;
      shown = read.record;
      texts = read.texts;
      paint();
    });
    const find = (from) => tried(async (isLast) => {
      const found = await source.find({ search: search.value, step: step.value, start: from, count: PAGE });
      if (!isLast()) return;
      start = from;
      items = found.items;
      record.replaceChildren(...items.map((each, i) => make("option", { value: i }, labelOf(each))));
      const last = Math.min(found.matches, start + PAGE);
      count.textContent = found.matches > PAGE
        ? `records ${number(start + 1)} to ${number(last)} of ${number(found.matches)}` : `${number(found.matches)} records`;
      earlier.disabled = start === 0;
      later.disabled = last >= found.matches;
      shown = null;
      if (items.length) await open();
      else view.replaceChildren(nothing("Nothing matches."));
    });

    let timer = 0;
    search.addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(() => find(0), WAIT_MS);
    });
    step.addEventListener("change", () => find(0));
    earlier.addEventListener("click", () => find(Math.max(0, start - PAGE)));
    later.addEventListener("click", () => find(start + PAGE));
    record.addEventListener("change", open);
    by.addEventListener("change", paint);
    const pages = total > PAGE ? [earlier, later] : [];
    panel.append(make("div", { class: "tools" }, field("Search", search), field("Step", step), field("Record", record),
      field("Colour by", by), ...pages, count), view);
    await find(0);
  }

  function labelOf(record) {
    const run = Data.head.runs.length > 1 ? `${Data.head.runs[record.run].label}, ` : "";
    return `${run}step ${record.step}, record ${record.name}, advantage ${number(record.advantage)}`;
  }

  const textOf = (record, id) => texts[id] ?? `<${id}>`;

  function fill(view, record, by) {
    const kind = BY[by];
    const masked = new Set(record.masked);
    const values = record.ids.map((_, i) => kind.of(record, i));
    const known = values.filter((value, i) => Number.isFinite(value) && !masked.has(i));
    const middle = kind.middle ?? 0;
    const reach = kind.signed
      ? Math.max(1e-12, ...known.map((value) => Math.abs(value - middle)))
      : Math.max(1e-12, Math.max(...known) - Math.min(...known));
    const least = Math.min(...known);
    const colour = (value) => {
      if (!Number.isFinite(value)) return "transparent";
      if (!kind.signed) return `color-mix(in srgb, var(--accent) ${Math.round(75 * (value - least) / reach)}%, transparent)`;
      const share = Math.round(75 * Math.abs(value - middle) / reach);
      return `color-mix(in srgb, var(${value < middle ? "--bad" : "--good"}) ${share}%, transparent)`;
    };
    const details = make("p", { class: "rule token-facts", "aria-live": "polite" }, "Move over a token, or go to it by Tab and the arrow keys.");
    const prompt = make("pre", { class: "text" }, record.prompt.map((id) => textOf(record, id)).join(""));
    const answer = make("pre", { class: "text tokens", tabindex: 0, "aria-label": "Tokens" });
    const tokens = record.ids.map((id, i) => make("span", {
      class: masked.has(i) ? "token masked" : "token", style: masked.has(i) ? null : `background:${colour(values[i])}`,
    }, textOf(record, id)));
    let place = -1;
    const point = (i) => {
      tokens[place]?.classList.remove("pointed");
      place = Math.min(tokens.length - 1, Math.max(0, i));
      tokens[place].classList.add("pointed");
      details.textContent = factsOf(record, place, masked.has(place));
    };
    tokens.forEach((token, i) => token.addEventListener("mouseenter", () => point(i)));
    answer.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!move) return;
      event.preventDefault();
      point(place + move);
    });
    answer.append(...tokens);
    const whole = record.actions > record.ids.length ? `, the first ${number(record.ids.length)} of ${number(record.actions)} tokens` : "";
    view.replaceChildren(
      make("article", { class: "card" },
        make("h3", {}, labelOf(record)),
        make("p", { class: "rule" }, `from replica ${record.replica}, weights ${record.version}${whole}; ${number(masked.size)} masked`),
        make("h4", {}, "Prompt"), prompt, make("h4", {}, "Answer"), answer, legendOf(kind, known, middle, reach), details),
      chartOf(record, masked));
  }

  function factsOf(record, i, isMasked) {
    const gap = gapOf(record, i);
    const facts = [
      `token ${i} (${record.ids[i]}) ${JSON.stringify(textOf(record, record.ids[i]))}`,
      `generator ${number(record.rollout[i])}`, `trainer ${number(record.trainer[i])}`,
      `ratio ${Number.isNaN(gap) ? "-" : Math.exp(gap).toFixed(5)}`,
    ];
    if (record.entropy.length) facts.push(`entropy ${number(record.entropy[i])}`);
    return facts.join(", ") + (isMasked ? ", masked: not trained on" : "");
  }

  function legendOf(kind, known, middle, reach) {
    if (!known.length) return rule("It was not computed.");
    const text = kind.signed
      ? `red: ${number(middle - reach)}, none: ${number(middle)}, green: ${number(middle + reach)}; struck out: masked`
      : `none: ${number(Math.min(...known))}, full: ${number(Math.max(...known))}; struck out: masked`;
    return rule(text);
  }

  function chartOf(record, masked) {
    return Processes.wide("Log-probs by token", 260, () => {
      const x = record.ids.map((_, i) => i);
      const text = record.ids.map((id) => Charts.plain(textOf(record, id)));
      const line = (name, y, i) => ({
        type: "scatter", mode: x.length > 100 ? "lines" : "lines+markers", name, x, y, customdata: text,
        line: { color: Charts.colour(i), width: 1.5 }, hovertemplate: "%{customdata}: %{y:.5g}",
      });
      const traces = [line("generator", record.rollout, 0), line("trainer", record.trainer, 1)];
      if (record.entropy.length) traces.push(line("entropy", record.entropy, 2));
      const shapes = [...masked].map((i) => ({ type: "rect", yref: "paper", x0: i - 0.5, x1: i + 0.5, y0: 0, y1: 1, fillcolor: "rgba(127,127,127,.25)", line: { width: 0 } }));
      return { traces, layout: { shapes, hovermode: "x unified", xaxis: { title: { text: "token" } }, yaxis: { title: { text: "nats" } } } };
    });
  }

  return { show };
})();
