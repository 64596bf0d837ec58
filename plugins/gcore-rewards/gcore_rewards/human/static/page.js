"use strict";
// Everything works without this script; it adds keys, and the seconds that a page was looked at.
const began = performance.now();
let isSent = false;

for (const form of document.forms) {
  form.addEventListener("submit", (event) => {
    if (isSent) {  // a second click or key while the first is on its way
      event.preventDefault();
      return;
    }
    isSent = true;
    if (form.elements.seconds) {
      form.elements.seconds.value = ((performance.now() - began) / 1000).toFixed(3);
    }
  });
}

document.addEventListener("keydown", (event) => {
  if (event.repeat || event.ctrlKey || event.altKey || event.metaKey) return;
  if (event.target.matches("input:not([type=hidden]), textarea")) return;
  for (const button of document.querySelectorAll("button[data-key]")) {
    if (button.dataset.key === event.key) {
      event.preventDefault();
      button.click();
      return;
    }
  }
});

// The browser may show a page from its memory after "back": its answer was sent already.
window.addEventListener("pageshow", (event) => {
  if (event.persisted) location.reload();
});
