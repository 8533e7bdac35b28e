// DOM nodes from names, attributes and texts. No module of this page turns a string into markup.

export function h(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else if (name === "vars") for (const [key, own] of Object.entries(value)) node.style.setProperty(key, own);
    else if (name === "value" || name === "checked" || name === "selected") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== undefined && child !== null && child !== false));
  return node;
}

export function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(digits)));
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 120) return `${number(value, 3)} s`;
  if (value < 7200) return `${number(value / 60, 3)} min`;
  return `${number(value / 3600, 3)} h`;
}

export function plural(count, word) {
  return `${number(count)} ${word}${count === 1 ? "" : "s"}`;
}

// A choice among few: buttons of which one is pressed.
export function choice(label, options, chosen, pick) {
  return h("div", { class: "choice", role: "group", "aria-label": label }, Object.entries(options).map(([key, text]) =>
    h("button", { type: "button", "aria-pressed": String(key === chosen), click: () => pick(key) }, text)));
}

// A message where something else would stand.
export function note(text, kind = "note") {
  return h("p", { class: kind, role: kind === "problem" ? "alert" : undefined }, text);
}

// Let the browser keep a file.
export function save(blob, name) {
  const address = URL.createObjectURL(blob);
  h("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);  // some browsers read it only after a question
}

export function colourOf(place) {
  return `var(--run-${place % 8})`;
}
