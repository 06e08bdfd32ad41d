// Filters the cells, follows links to one, and opens all for the printer. Without it the page can be read.
"use strict";
(() => {
  const find = (selector) => [...document.querySelectorAll(selector)];
  const cells = find("details.cell");
  const texts = new Map(cells.map((cell) => [cell, cell.textContent.toLowerCase()]));
  const query = document.getElementById("query");
  const chips = find("button[data-verdict]");
  const all = document.getElementById("all");
  const visible = () => cells.filter((cell) => !cell.hidden);

  function filter() {
    const words = query.value.toLowerCase().split(/\s+/).filter(Boolean);
    const pressed = chips.filter((chip) => chip.getAttribute("aria-pressed") === "true");
    const wanted = pressed.map((chip) => chip.dataset.verdict);
    for (const cell of cells) {
      const is = cell.dataset.is.split("|");
      const fits = !wanted.length || wanted.some((verdict) => is.includes(verdict));
      cell.hidden = !(fits && words.every((word) => texts.get(cell).includes(word)));
    }
    for (const part of find("[data-cell]")) {
      part.classList.toggle("out", document.getElementById(part.dataset.cell).hidden);
    }
    const count = visible().length;
    document.getElementById("shown").textContent = `${count} of ${cells.length}`;
    document.getElementById("none").hidden = count > 0;
    label();
  }

  function label() {
    all.textContent = visible().every((cell) => cell.open) ? "close all" : "open all";
  }

  function clear() {
    query.value = "";
    chips.forEach((chip) => chip.setAttribute("aria-pressed", "false"));
    filter();
  }

  // Opens the cell that the address names.
  function follow() {
    const cell = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!cell || !cells.includes(cell)) return;
    if (cell.hidden) clear();
    cell.open = true;
    cell.scrollIntoView({ block: "start" });
    cell.querySelector("summary").focus({ preventScroll: true });
  }

  function move(by) {
    const shown = visible();
    const at = shown.indexOf(document.activeElement.closest?.("details.cell"));
    const next = at < 0 ? shown[by > 0 ? 0 : shown.length - 1] : shown[at + by];
    next?.querySelector("summary").focus();
  }

  query.addEventListener("input", filter);
  for (const chip of chips) {
    chip.addEventListener("click", () => {
      chip.setAttribute("aria-pressed", String(chip.getAttribute("aria-pressed") !== "true"));
      filter();
    });
  }
  for (const cell of cells) {
    cell.addEventListener("toggle", () => {
      label();
      if (cell.open && cell.contains(document.activeElement)) {
        history.replaceState(null, "", `#${encodeURIComponent(cell.id)}`);
      }
    });
  }
  all.addEventListener("click", () => {
    const open = !visible().every((cell) => cell.open);
    visible().forEach((cell) => { cell.open = open; });
    label();
  });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target === query) {
      if (event.key === "Escape") {
        clear();
        query.blur(); // "/" is a key again, not a part of what is looked for
      }
      return;
    }
    const keys = {
      "/": () => query.focus(),
      Escape: clear,
      j: () => move(1),
      k: () => move(-1),
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });

  let closed = [];
  addEventListener("beforeprint", () => {
    closed = find("details.cell:not([hidden]), details.cell:not([hidden]) details.log")
      .filter((part) => !part.open);
    closed.forEach((part) => { part.open = true; });
  });
  addEventListener("afterprint", () => closed.forEach((part) => { part.open = false; }));
  addEventListener("hashchange", follow);
  for (const link of find("a[href^='#']")) {
    link.addEventListener("click", () => {
      if (link.hash === location.hash) setTimeout(follow); // no hashchange comes of it
    });
  }

  find(".tools").forEach((part) => { part.hidden = false; });
  filter();
  addEventListener("load", () => setTimeout(follow)); // after the browser went there by itself
})();
