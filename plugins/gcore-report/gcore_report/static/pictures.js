"use strict";

// Galleries: a row for each prompt, its pictures in the order of steps.
const Pictures = (() => {
  function show(panel, data) {
    panel.append(rule(`${number(data.shown)} of ${number(data.total)} pictures are here. ${data.rule}`));
    if (!data.pictures.length) {
      panel.append(nothing("The answers of this run have no pictures."));
      return;
    }
    const modes = [...new Set(data.pictures.map((picture) => picture[2]))];
    const mode = choice(modes.map((text) => [text, text]));
    const search = make("input", { type: "search", placeholder: "in prompts", "data-search": true });
    const rows = make("div", {});
    const update = () => fill(rows, data.pictures.filter((picture) =>
      picture[2] === mode.value && picture[3].toLowerCase().includes(search.value.toLowerCase())));
    mode.addEventListener("change", update);
    search.addEventListener("input", update);
    panel.append(make("div", { class: "tools" }, field("Search", search), field("Mode", mode)), rows);
    update();
  }

  function fill(rows, pictures) {
    const byPrompt = new Map();
    for (const picture of pictures) {
      const key = `${picture[3]}\n${picture[4]}`;
      byPrompt.set(key, [...(byPrompt.get(key) || []), picture]);
    }
    rows.replaceChildren(...[...byPrompt.values()].map((own) => make("section", { class: "gallery" },
      make("h3", {}, own[0][3] || "(no prompt)"),
      make("div", { class: "strip", tabindex: 0, role: "group", "aria-label": own[0][3] }, ...own.map(pictureOf)))));
    if (!pictures.length) rows.append(nothing("Nothing matches."));
  }

  function pictureOf([run, step, mode, prompt, name, rewards, address]) {
    const label = Data.head.runs.length > 1 ? `${Data.head.runs[run].label}, step ${step}` : `step ${step}`;
    const values = Object.entries(rewards).flatMap(([reward, value]) => [make("br"), `${reward} ${number(value)}`]);
    return make("figure", {},
      make("img", { src: address, alt: `${prompt}, ${mode}, ${name}, ${label}` }),
      make("figcaption", {}, make("b", {}, label), ...values));
  }

  return { show };
})();
