// Elements, and what the document says.
const report = JSON.parse(document.getElementById("data").textContent);
const said = (number) => report.shared[number];
const at = (id) => document.getElementById(id);
const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((c) => c !== null && c !== undefined && c !== ""));
  return element;
}

const make = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);
const draw = (tag, attributes = {}, ...children) =>
  filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

// A list of terms and texts; terms that repeat are said once.
function terms(rows) {
  const list = make("dl");
  let last = null;
  for (const [term, text] of rows) {
    list.append(make("dt", { title: term }, term === last ? "" : term), make("dd", {}, text));
    last = term;
  }
  return list;
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const swatch = (tint) => make("span", { class: "swatch", style: `background: ${tint}` });
