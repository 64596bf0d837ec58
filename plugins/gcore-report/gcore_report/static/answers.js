"use strict";

// Evaluated answers: searched, and compared between steps word by word.
const Answers = (() => {
  const PAGE = 60;  // rows that are made at once
  const MOST_WORDS = 1500;  // of a text that is compared; the table of a comparison grows with its square
  const WAIT_MS = 150;  // for the next letter of a search
  let source = null;
  let matches = 0;
  let asked = 0;  // number of the last search: an earlier one that ends later shows nothing
  let chosen = 0;  // number of the last answer that was chosen, likewise
  let list = null;
  let detail = null;

  async function show(panel, data) {
    source = Sources.answers(data);
    panel.append(rule(source.facts.sentence));
    if (!source.facts.total) {
      panel.append(nothing("Nothing was evaluated yet. evaluation.show says how many answers a run keeps."));
      return;
    }
    const tools = toolsOf(source.facts);
    list = make("div", { class: "answers", role: "list", "aria-label": "Answers" });
    list.addEventListener("keydown", move);
    detail = make("article", { class: "card detail", "aria-live": "polite" }, nothing("Choose an answer."));
    panel.append(tools, make("div", { class: "split" }, list, detail));
    await find();
  }

  const inputs = {};

  function toolsOf({ steps, modes, rewards }) {
    const all = (texts) => [["", "all"], ...texts.map((text) => [String(text), String(text)])];
    inputs.search = make("input", { type: "search", placeholder: "in prompts and answers", "data-search": true });
    inputs.run = choice([["", "all"], ...Data.head.runs.map((run, i) => [String(i), run.label])]);
    inputs.step = choice(all(steps));
    inputs.mode = choice(all(modes));
    inputs.order = choice([["", "as evaluated"], ...rewards.flatMap((name) => [[`-${name}`, `lowest ${name}`], [`+${name}`, `highest ${name}`]])]);
    let timer = 0;
    for (const input of Object.values(inputs)) {
      input.addEventListener(input.tagName === "SELECT" ? "change" : "input", () => {
        clearTimeout(timer);
        timer = setTimeout(find, Data.head.live && input.tagName !== "SELECT" ? WAIT_MS : 0);
      });
    }
    inputs.count = make("output", { "aria-live": "polite" });
    const fields = [field("Search", inputs.search), field("Step", inputs.step), field("Mode", inputs.mode), field("Order", inputs.order)];
    if (Data.head.runs.length > 1) fields.splice(1, 0, field("Run", inputs.run));
    return make("div", { class: "tools" }, ...fields, inputs.count);
  }

  // Shows an error of the source, such as a server that is gone, where its result would be.
  async function tried(promise, place) {
    try {
      return await promise;
    } catch (error) {
      place.replaceChildren(nothing(`It could not be read: ${error.message}`));
      return null;
    }
  }

  function pageFrom(start) {
    const { search, run, step, mode, order } = inputs;
    return source.find({ search: search.value, run: run.value, step: step.value, mode: mode.value, order: order.value, start, count: PAGE });
  }

  async function find() {
    const own = ++asked;
    const found = await tried(pageFrom(0), list);
    if (own !== asked || !found) return;
    matches = found.matches;
    inputs.count.textContent = `${matches.toLocaleString("en")} answers`;
    list.replaceChildren();
    append(found.items);
    if (matches) await choose(found.items[0], list.firstElementChild);
    else detail.replaceChildren(nothing("Nothing matches."));
  }

  async function more(event) {
    const own = asked;
    const button = event.currentTarget;
    button.disabled = true;
    const found = await tried(pageFrom(list.querySelectorAll(".item").length), detail);
    button.disabled = false;
    if (own !== asked || !found) return;
    button.remove();
    append(found.items);
  }

  function append(items) {
    list.append(...items.map(itemOf));
    if (items.length && list.children.length < matches) {
      list.append(make("button", { type: "button", class: "more", onclick: more }, "More"));
    }
  }

  function itemOf(row) {
    const item = make("button", { type: "button", class: "item" },
      make("span", { class: "facts" }, `step ${row.step} ${row.mode}`, ...chips(row.rewards)),
      make("span", { class: "excerpt" }, row.excerpt || "(no text)"));
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

  async function choose(item, element) {
    const own = ++chosen;
    list.querySelector("[aria-current]")?.removeAttribute("aria-current");
    element?.setAttribute("aria-current", "true");
    const row = await tried(source.read(item.key), detail);
    if (own === chosen && row) fill(row);
  }

  function fill(row) {
    const answer = make("pre", { class: "text" }, row.text);
    const label = (each) => `step ${each.step}${Data.head.runs.length > 1 ? ` of ${Data.head.runs[each.run].label}` : ""}`;
    const against = choice([["", "nothing"], ...row.others.map((each, i) => [String(i), label(each)])]);
    const legend = make("p", { class: "rule" });
    against.addEventListener("change", () => compare(answer, legend, row, row.others[against.value], label));
    const pictures = row.pictures.map(([name, address]) => make("img", { src: address, alt: name, title: name }));
    detail.replaceChildren(
      make("h3", {}, `${Data.head.runs[row.run].label}, step ${row.step}, ${row.mode}${row.status ? `, ${row.status}` : ""}`),
      make("p", {}, ...chips(row.rewards)), ...pictures,
      make("h4", {}, "Prompt"), make("pre", { class: "text" }, row.prompt),
      make("div", { class: "tools" }, make("h4", {}, "Answer"), row.others.length ? field("compared with", against) : null),
      answer, legend);
  }

  async function compare(answer, legend, row, other, label) {
    if (!other) {
      answer.textContent = row.text;
      legend.textContent = "";
      return;
    }
    const own = ++chosen;
    const before = await tried(source.read(other.key), legend);
    if (own !== chosen || !before) return;
    const parts = difference(words(before.text), words(row.text));
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
