"use strict";

// Galleries: a row for each prompt, its pictures in the order of steps.
const Pictures = (() => {
  const PAGE = 60;  // pictures that `g-core watch` is asked for at once
  const WAIT_MS = 150;  // for the next letter of a search

  async function show(panel, data) {
    const source = Sources.pictures(data);
    const { steps, modes, total, sentence } = source.facts;
    panel.append(rule(sentence));
    if (!total) {
      panel.append(nothing("The answers of this run have no pictures."));
      return;
    }
    const mode = choice(modes.map((text) => [text, text]));
    const step = choice([["", "all"], ...steps.map((each) => [String(each), String(each)])]);
    const search = make("input", { type: "search", placeholder: "in prompts", "data-search": true });
    const earlier = make("button", { type: "button" }, "Earlier");
    const later = make("button", { type: "button" }, "Later");
    const count = make("output", { "aria-live": "polite" });
    const rows = make("div", {});
    let start = 0;
    let asked = 0;  // number of the last request: an earlier one that ends later shows nothing

    const find = async (from) => {
      const own = ++asked;
      try {
        const query = { search: search.value, step: step.value, mode: mode.value, start: from, count: PAGE };
        const found = await source.find(query);
        if (own !== asked) return;
        start = from;
        fill(rows, found.items);
        const last = start + found.items.length;
        const isPart = found.items.length < found.matches;
        count.textContent = isPart
          ? `pictures ${number(start + 1)} to ${number(last)} of ${number(found.matches)}` : `${number(found.matches)} pictures`;
        earlier.hidden = later.hidden = !isPart;
        earlier.disabled = start === 0;
        later.disabled = last >= found.matches;
      } catch (error) {
        if (own === asked) rows.replaceChildren(nothing(`They could not be read: ${error.message}`));
      }
    };

    let timer = 0;
    search.addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(() => find(0), WAIT_MS);
    });
    for (const input of [step, mode]) input.addEventListener("change", () => find(0));
    earlier.addEventListener("click", () => find(Math.max(0, start - PAGE)));
    later.addEventListener("click", () => find(start + PAGE));
    panel.append(make("div", { class: "tools" }, field("Search", search), field("Step", step), field("Mode", mode),
      earlier, later, count), rows);
    await find(0);
  }

  function fill(rows, pictures) {
    const byPrompt = new Map();
    for (const picture of pictures) {
      const key = `${picture.prompt}\n${picture.name}`;
      byPrompt.set(key, [...(byPrompt.get(key) || []), picture]);
    }
    rows.replaceChildren(...[...byPrompt.values()].map((own) => make("section", { class: "gallery" },
      make("h3", {}, own[0].prompt || "(no prompt)"),
      make("div", { class: "strip", tabindex: 0, role: "group", "aria-label": own[0].prompt }, ...own.map(pictureOf)))));
    if (!pictures.length) rows.append(nothing("Nothing matches."));
  }

  function pictureOf({ run, step, mode, prompt, name, rewards, address }) {
    const label = Data.head.runs.length > 1 ? `${Data.head.runs[run].label}, step ${step}` : `step ${step}`;
    const values = Object.entries(rewards).flatMap(([reward, value]) => [make("br"), `${reward} ${number(value)}`]);
    const image = address ? make("img", { src: address, alt: `${prompt}, ${mode}, ${name}, ${label}` })
      : nothing("Its file cannot be read.");
    return make("figure", {},
      image,
      make("figcaption", {}, make("b", {}, label), ...values));
  }

  return { show };
})();
