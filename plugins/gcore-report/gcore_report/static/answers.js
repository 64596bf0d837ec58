"use strict";

// Evaluated answers: searched, and compared between steps word by word.
const Answers = (() => {
  const PAGE = 60;  // rows that are made at once
  const MOST_WORDS = 1500;  // of a text that is compared; the table of a comparison grows with its square
  let data = null;
  let matches = [];
  let list = null;
  let detail = null;

  function show(panel, given) {
    data = given;
    panel.append(rule(`${data.shown.toLocaleString("en")} of ${data.total.toLocaleString("en")} evaluated answers are here. ${data.rule}`));
    if (!data.rows.length) {
      panel.append(nothing("Nothing was evaluated yet. evaluation.show says how many answers a run keeps."));
      return;
    }
    const tools = toolsOf();
    list = make("div", { class: "answers", role: "list", "aria-label": "Answers" });
    list.addEventListener("keydown", move);
    detail = make("article", { class: "card detail", "aria-live": "polite" }, nothing("Choose an answer."));
    panel.append(tools, make("div", { class: "split" }, list, detail));
    find();
  }

  const inputs = {};

  function toolsOf() {
    const values = (place) => [...new Set(data.rows.map((row) => row[place]))];
    const all = (texts) => [["", "all"], ...texts.map((text) => [String(text), String(text)])];
    const rewards = [...new Set(data.rows.flatMap((row) => Object.keys(row[5])))];
    inputs.text = make("input", { type: "search", placeholder: "in prompts and answers", "data-search": true });
    inputs.run = choice([["", "all"], ...Data.head.runs.map((run, i) => [String(i), run.label])]);
    inputs.step = choice(all(values(1).sort((a, b) => a - b)));
    inputs.mode = choice(all(values(2)));
    inputs.order = choice([["", "as evaluated"], ...rewards.flatMap((name) => [[`-${name}`, `lowest ${name}`], [`+${name}`, `highest ${name}`]])]);
    for (const input of Object.values(inputs)) {
      input.addEventListener(input.tagName === "SELECT" ? "change" : "input", find);
    }
    inputs.count = make("output", { "aria-live": "polite" });
    const fields = [field("Search", inputs.text), field("Step", inputs.step), field("Mode", inputs.mode), field("Order", inputs.order)];
    if (Data.head.runs.length > 1) fields.splice(1, 0, field("Run", inputs.run));
    return make("div", { class: "tools" }, ...fields, inputs.count);
  }

  function find() {
    const text = inputs.text.value.toLowerCase();
    const found = data.texts.map((each) => !text || each.toLowerCase().includes(text));
    matches = data.rows.filter((row) => (found[row[3]] || found[row[4]])
      && (!inputs.run.value || String(row[0]) === inputs.run.value)
      && (!inputs.step.value || String(row[1]) === inputs.step.value)
      && (!inputs.mode.value || row[2] === inputs.mode.value));
    const order = inputs.order.value;
    if (order) {
      const sign = order[0] === "+" ? -1 : 1;
      const value = (row) => row[5][order.slice(1)] ?? sign * Infinity;
      matches = [...matches].sort((a, b) => sign * (value(a) - value(b)));
    }
    inputs.count.textContent = `${matches.length.toLocaleString("en")} answers`;
    list.replaceChildren();
    more();
    if (matches.length) choose(matches[0], list.firstElementChild);
    else detail.replaceChildren(nothing("Nothing matches."));
  }

  function more() {
    const button = list.querySelector(".more");
    if (button) button.remove();
    const first = list.children.length;
    list.append(...matches.slice(first, first + PAGE).map(itemOf));
    if (matches.length > first + PAGE) {
      list.append(make("button", { type: "button", class: "more", onclick: more }, "More"));
    }
  }

  function itemOf(row) {
    const item = make("button", { type: "button", class: "item" },
      make("span", { class: "facts" }, `step ${row[1]} ${row[2]}`, ...chips(row[5])),
      make("span", { class: "excerpt" }, data.texts[row[4]].slice(0, 160) || "(no text)"));
    item.addEventListener("click", () => choose(row, item));
    item.addEventListener("focus", () => choose(row, item));
    return item;
  }

  function chips(rewards) {
    return Object.entries(rewards).map(([name, value]) =>
      make("span", { class: value > 0 ? "chip good" : "chip" }, `${name} ${number(value)}`));
  }

  function move(event) {
    const next = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    if (!next) return;
    event.preventDefault();
    document.activeElement[next]?.focus();
  }

  function choose(row, item) {
    list.querySelector("[aria-current]")?.removeAttribute("aria-current");
    item?.setAttribute("aria-current", "true");
    const others = data.rows.filter((each) => each !== row && each[3] === row[3] && each[2] === row[2]);
    const answer = make("pre", { class: "text" }, data.texts[row[4]]);
    const label = (each) => `step ${each[1]}${Data.head.runs.length > 1 ? ` of ${Data.head.runs[each[0]].label}` : ""}`;
    const against = choice([["", "nothing"], ...others.map((each, i) => [String(i), label(each)])]);
    const legend = make("p", { class: "rule" });
    against.addEventListener("change", () => compare(answer, legend, row, others[against.value], label));
    detail.replaceChildren(
      make("h3", {}, `${Data.head.runs[row[0]].label}, step ${row[1]}, ${row[2]}${row[6] ? `, ${row[6]}` : ""}`),
      make("p", {}, ...chips(row[5])),
      make("h4", {}, "Prompt"), make("pre", { class: "text" }, data.texts[row[3]]),
      make("div", { class: "tools" }, make("h4", {}, "Answer"), others.length ? field("compared with", against) : null),
      answer, legend);
  }

  function compare(answer, legend, row, other, label) {
    if (!other) {
      answer.textContent = data.texts[row[4]];
      legend.textContent = "";
      return;
    }
    const parts = difference(words(data.texts[other[4]]), words(data.texts[row[4]]));
    answer.replaceChildren(...parts.map(([kind, text]) => kind === "same" ? text : make(kind, {}, text)));
    legend.textContent = `Struck out: only at ${label(other)}. Underlined: only here.`;
  }

  // Words, or single characters where a text has no spaces, such as a sum.
  function words(text) {
    const parts = text.split(/(\s+)/).filter(Boolean);
    const small = parts.length > 2 || text.length > MOST_WORDS ? parts : [...text];
    return small.slice(0, MOST_WORDS);
  }

  // The longest common subsequence of two lists of words, as [same, del or ins, text] in order.
  function difference(before, after) {
    const width = after.length + 1;
    const longest = new Uint16Array((before.length + 1) * width);
    for (let i = before.length - 1; i >= 0; i--) {
      for (let j = after.length - 1; j >= 0; j--) {
        longest[i * width + j] = before[i] === after[j]
          ? longest[(i + 1) * width + j + 1] + 1
          : Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
      }
    }
    const parts = [];
    const add = (kind, text) => {
      const last = parts[parts.length - 1];
      if (last && last[0] === kind) last[1] += text;
      else parts.push([kind, text]);
    };
    let i = 0;
    let j = 0;
    while (i < before.length || j < after.length) {
      if (i < before.length && j < after.length && before[i] === after[j]) {
        add("same", after[j]);
        i++;
        j++;
      } else if (j === after.length || (i < before.length && longest[(i + 1) * width + j] >= longest[i * width + j + 1])) {
        add("del", before[i++]);
      } else {
        add("ins", after[j++]);
      }
    }
    return parts;
  }

  return { show };
})();
