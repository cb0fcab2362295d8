// Elements and lists of elements. Text enters the document as text nodes alone, never as HTML.

/** An element with attributes, listeners (functions, by the event's name) and children (nodes or text). */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== undefined));
  return node;
}

export const byId = (id) => document.getElementById(id);

/** Sets a node's text; costs nothing if it has it. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

/** Keeps what follows the present children of `parent` equal to a list: a view, {node, update(value)}, for each key. */
export class Views {
  #parent;
  #head;
  #make;
  #views = new Map();

  constructor(parent, make) {
    this.#parent = parent;
    this.#head = parent.lastChild;
    this.#make = make;
  }

  /** `entries`: [key, value], in the order in which they are shown. */
  update(entries) {
    const keys = new Set(entries.map(([key]) => key));
    for (const [key, view] of this.#views) {
      if (keys.has(key)) continue;
      view.node.remove();
      this.#views.delete(key);
    }
    let next = this.#head ? this.#head.nextSibling : this.#parent.firstChild;
    for (const [key, value] of entries) {
      if (!this.#views.has(key)) this.#views.set(key, this.#make(key, value));
      const view = this.#views.get(key);
      if (view.node === next) next = next.nextSibling;
      else this.#parent.insertBefore(view.node, next);
      view.update(value);
    }
  }
}

/** A table in which each row is a tbody, so that it may have details below; `columns`: [title, class, description]. */
export function table(columns, empty) {
  const head = columns.map(([title, kind, about]) => el("th", { class: kind, title: about, scope: "col" }, title));
  const note = el("caption", { class: "empty" }, empty);
  const node = el("table", {}, note, el("thead", {}, el("tr", {}, ...head)));
  return { node, isEmpty: (is) => { note.hidden = !is; } };
}
