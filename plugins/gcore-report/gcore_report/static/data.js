"use strict";

// The data of each panel: they lie in this file, packed, or come from `g-core watch`.
const Data = (() => {
  const loaded = new Map();
  const head = JSON.parse(document.getElementById("data-head").textContent);

  function load(name) {
    if (!loaded.has(name)) loaded.set(name, find(name));
    return loaded.get(name);
  }

  // Asks anew the next time, since a live run has gone on.
  function forget(name) {
    loaded.delete(name);
  }

  async function find(name) {
    const element = document.getElementById(`data-${name}`);
    if (!element) return (await fetch(`data/${name}`)).json();
    if (element.type === "application/json") return JSON.parse(element.textContent);
    return unpacked(element.textContent);
  }

  function unpacked(base64) {
    const characters = atob(base64);
    const bytes = new Uint8Array(characters.length);
    for (let i = 0; i < characters.length; i++) bytes[i] = characters.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).json();
  }

  return { forget, head, load };
})();

// Makes an element. Texts become text nodes: nothing that a run has written is ever read as HTML.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

function number(value) {
  if (value === null || value === undefined) return "-";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

// A field with its label, as all tool bars have it.
function field(label, input) {
  return make("label", {}, `${label} `, input);
}

function choice(options, attributes = {}) {
  return make("select", attributes, ...options.map(([value, text]) => make("option", { value }, text)));
}

function rule(text) {
  return make("p", { class: "rule" }, text);
}

function nothing(text) {
  return make("p", { class: "nothing" }, text);
}
