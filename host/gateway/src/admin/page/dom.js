// Builds elements. Text from policies, engines and clients becomes text nodes, never markup.

const SVG = "http://www.w3.org/2000/svg";

/** Appends children: elements, text, or nothing. Lists are flattened. */
function fill(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false || child === "") continue;
    node.append(child instanceof Node ? child : String(child));
  }
  return node;
}

/** Returns an element: `make("td.n", { title: "…" }, "text", child)`. */
export function make(kind, attributes, ...children) {
  const [tag, ...classes] = kind.split(".");
  const node = document.createElement(tag || "div");
  if (classes.length) node.className = classes.join(" ");
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node[name] = value;
    else if (name === "style") for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  return fill(node, children);
}

/** Returns an SVG element. */
export function draw(tag, attributes, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes ?? {})) node.setAttribute(name, String(value));
  return fill(node, children);
}

/**
 * Makes the children of an element equal to these. Elements that are the same stay, with the focus in them: new ones
 * would each cost the browser a style and a layout.
 */
export function put(node, ...children) {
  merge(node, fill(document.createElement("div"), children));
  return node;
}

/** Marks an element that has a life of its own: `put` does not merge it into another. */
export const apart = (node) => Object.assign(node, { isApart: true });

function merge(old, fresh) {
  const wanted = [...fresh.childNodes];
  wanted.forEach((want, place) => {
    const have = old.childNodes[place];
    if (!have) old.append(want);
    else if (!isSame(have, want)) old.replaceChild(want, have);
    else if (have.nodeType === 3) have.data !== want.data && (have.data = want.data);
    else {
      copy(have, want);
      merge(have, want);
    }
  });
  while (old.childNodes.length > wanted.length) old.lastChild.remove();
}

const isSame = (have, want) => have.nodeType === want.nodeType && have.nodeName === want.nodeName && !have.isApart && !want.isApart
  && (have.nodeType === 3 || (have.getAttribute("class") === want.getAttribute("class") && have.dataset.key === want.dataset.key));

/** Copies attributes, handlers and style. A `details` stays open. */
function copy(have, want) {
  for (const { name } of [...have.attributes]) if (!want.hasAttribute(name) && !["open", "style", "aria-describedby"].includes(name)) have.removeAttribute(name);
  for (const { name, value } of want.attributes) if (name !== "style" && have.getAttribute(name) !== value) have.setAttribute(name, value);
  if (have.style && have.style.cssText !== want.style.cssText) have.style.cssText = want.style.cssText;
  if (have.onclick !== want.onclick) have.onclick = want.onclick;
  if (want.lookup) have.lookup = want.lookup;
}

/** Sets a text when it differs, so that screen readers and selections are not disturbed, and keeps its node. */
export function setText(node, text) {
  if (node.textContent === text) return;
  const only = node.childNodes.length === 1 && node.firstChild?.nodeType === 3;
  if (only) node.firstChild.data = text;
  else node.textContent = text;
}

/** Sets an attribute when it differs; null removes it. */
export function setAttribute(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

/** Builds the content of an element again when `data` differs from the last time. */
export function render(node, data, build) {
  const shape = JSON.stringify(data);
  if (node.shape === shape) return;
  node.shape = shape;
  put(node, build());
}

/** Whether the pointer or the focus is in an element: what is there must not become another thing. */
export const isPointed = (node) => node.matches(":hover") || node.contains(document.activeElement);

export const chip = (kind, ...text) => make(`span.chip.${kind}`, null, ...text);
export const dim = (...text) => make("span.dim", null, ...text);
export const button = (kind, label, onclick, more) => make(`button${kind ? `.${kind}` : ""}`, { type: "button", onclick, ...more }, label);
export const link = (href, ...text) => make("a", { href }, ...text);

/** A group of buttons of which one is pressed. */
export function choice(label, options, chosen, choose) {
  const group = make("div.seg", { role: "group", "aria-label": label });
  for (const [value, name] of options) {
    group.append(button("", name, () => {
      for (const other of group.children) other.setAttribute("aria-pressed", String(other.dataset.value === value));
      choose(value);
    }, { "data-value": value, "aria-pressed": String(value === chosen) }));
  }
  return group;
}

/** A card with a title. */
export const card = (kind, title, beside, ...content) =>
  make(`section.card${kind ? `.${kind}` : ""}`, null, make("div.head", null, make("h2", null, title), beside), content);

/** A table with column heads: text, or `[class, text]`. */
export const table = (kind, heads, ...rows) =>
  make(`table.${kind}`, null, make("thead", null, make("tr", null, heads.map((head) => (Array.isArray(head) ? make(`th.${head[0]}`, null, head[1]) : make("th", null, head))))), make("tbody", null, rows));
