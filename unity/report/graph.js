// A graph that can be moved, zoomed and walked through. Nodes: [x, y, width, height, title, below, look, colour, key, described].
const NEAREST = 4;
const FARTHEST = 0.02;
const UNREADABLE = 0.33;
const ANIMATED = 600;

class Graph {
  constructor(host, chosen) {
    this.chosen = chosen;
    this.layers = ["boxes", "edges", "nodes"].map((name) => draw("g", { class: name }));
    this.view = draw("g", {}, ...this.layers);
    this.svg = draw(
      "svg",
      {
        class: "canvas",
        tabindex: 0,
        role: "application",
        "aria-label": "Graph. Arrow keys walk along edges, plus and minus zoom, 0 shows all, Escape lets go.",
      },
      this.view,
    );
    host.append(this.svg);
    this.places = new Map();
    this.at = { x: 0, y: 0, scale: 1 };
    this.selected = null;
    this.listen();
  }

  // Shows a picture. `marked`: nodes that are new, or spoken of.
  show(picture, marked) {
    if (picture !== this.picture) {
      const key = this.selected === null ? null : this.picture.nodes[this.selected][8];
      const first = !this.picture;
      this.picture = picture;
      this.build();
      if (first || !this.moved) this.fit();
      this.select(key === null ? -1 : picture.nodes.findIndex((n) => n[8] === key), false);
    }
    const wanted = new Set(marked);
    this.elements.forEach((e, k) => e.classList.toggle("new", wanted.has(k)));
    if (marked.length && !marked.some((k) => this.visible(k))) this.centre(marked[0]);
  }

  build() {
    const { nodes, edges, boxes } = this.picture;
    const old = this.places;
    this.places = new Map(nodes.map((n) => [n[8], n]));
    this.elements = nodes.map((n, k) => this.node(n, k));
    this.paths = edges.map(([, , points]) => draw("path", { class: "edge", d: way(points) }));
    this.layers[0].replaceChildren(
      ...boxes.map(([x, y, width, height, title]) =>
        draw(
          "g",
          { class: "box" },
          draw("rect", { x, y, width, height, rx: 8 }),
          draw("text", { x: x + 12, y: y + 18 }, said(title)),
        ),
      ),
    );
    this.layers[1].replaceChildren(...this.paths);
    this.layers[2].replaceChildren(...this.elements);
    this.readers = nodes.map(() => new Set());
    this.operands = nodes.map(() => new Set());
    for (const [source, targets] of edges) {
      for (const target of targets) {
        this.readers[source].add(target);
        this.operands[target].add(source);
      }
    }
    if (old.size && !calm && nodes.length < ANIMATED) this.move(old);
  }

  node([x, y, width, height, title, below, look, tint], k) {
    const under = said(below);
    const middle = under ? height / 2 - 3 : height / 2 + 4;
    return draw(
      "g",
      { class: `node ${look}${tint >= 0 ? ` c${tint}` : ""}`, transform: `translate(${x},${y})`, "data-k": k },
      draw("rect", { width, height, rx: look === "input" || look === "result" ? height / 2 : 5 }),
      draw("text", { x: width / 2, y: middle }, said(title)),
      under ? draw("text", { class: "sub", x: width / 2, y: height / 2 + 12 }, under) : null,
    );
  }

  // What was there before goes to its new place, what is new appears.
  move(old) {
    this.picture.nodes.forEach((n, k) => {
      const was = old.get(n[8]);
      const from = was ? { transform: `translate(${was[0]}px,${was[1]}px)` } : { opacity: 0 };
      const to = was ? { transform: `translate(${n[0]}px,${n[1]}px)` } : { opacity: 1 };
      this.elements[k].animate([from, to], { duration: 350, easing: "ease-in-out" });
    });
    for (const path of this.paths) path.animate([{ opacity: 0 }, { opacity: 1 }], { duration: 500, easing: "ease-in" });
  }

  select(k, centre = true) {
    if (this.selected !== null) this.elements[this.selected]?.classList.remove("chosen");
    this.selected = k === null || k < 0 ? null : k;
    this.paths.forEach((path, e) => {
      const [source, targets] = this.picture.edges[e];
      path.classList.toggle("near", this.selected !== null && (source === k || targets.includes(k)));
    });
    if (this.selected !== null) {
      this.elements[k].classList.add("chosen");
      if (centre) this.centre(k);
    }
    this.chosen(this.selected);
  }

  // Lets those stand out of which a test is true; null: all.
  light(test) {
    this.view.classList.toggle("dim", test !== null);
    this.elements.forEach((e, k) => e.classList.toggle("lit", test !== null && test(this.picture.nodes[k])));
  }

  listen() {
    const svg = this.svg;
    let from = null;
    let moved = false;
    svg.addEventListener("pointerdown", (e) => {
      from = { x: e.clientX, y: e.clientY, at: this.at };
      moved = false;
    });
    svg.addEventListener("pointermove", (e) => {
      if (!from || !(e.buttons & 1)) return;
      const dx = e.clientX - from.x;
      const dy = e.clientY - from.y;
      if (!moved && Math.hypot(dx, dy) < 4) return;
      if (!moved) svg.setPointerCapture(e.pointerId);
      moved = true;
      this.to({ ...from.at, x: from.at.x + dx, y: from.at.y + dy });
    });
    svg.addEventListener("click", (e) => {
      from = null;
      if (moved) return;
      const found = e.target.closest(".node");
      this.select(found ? Number(found.dataset.k) : null, false);
    });
    svg.addEventListener(
      "wheel",
      (e) => {
        if (!(e.ctrlKey || e.metaKey || document.activeElement === svg)) return;
        e.preventDefault();
        const box = svg.getBoundingClientRect();
        this.zoom(Math.exp(-e.deltaY * (e.ctrlKey ? 0.01 : 0.0015)), e.clientX - box.left, e.clientY - box.top);
      },
      { passive: false },
    );
    svg.addEventListener("keydown", (e) => this.key(e));
    new ResizeObserver(() => {
      if (this.picture && !this.moved) this.fit();
    }).observe(svg);
  }

  key(e) {
    const walks = {
      ArrowDown: () => this.next(this.readers),
      ArrowUp: () => this.next(this.operands),
      ArrowLeft: () => this.beside(-1),
      ArrowRight: () => this.beside(1),
    };
    const does = {
      "+": () => this.zoom(1.3),
      "=": () => this.zoom(1.3),
      "-": () => this.zoom(1 / 1.3),
      0: () => this.fit(true),
      Escape: () => this.select(null),
      ...walks,
    }[e.key];
    if (!does || e.ctrlKey || e.metaKey || e.altKey) return;
    e.preventDefault();
    if (e.key in walks && this.selected === null) return this.select(0);
    does();
  }

  next(neighbours) {
    const [first] = neighbours[this.selected];
    if (first !== undefined) this.select(first);
  }

  // The nearest node to the left or to the right, at about the same height.
  beside(direction) {
    const here = middle(this.picture.nodes[this.selected]);
    let best = -1;
    let least = Infinity;
    this.picture.nodes.forEach((n, k) => {
      const there = middle(n);
      const dx = (there.x - here.x) * direction;
      const dy = Math.abs(there.y - here.y);
      if (dx > 1 && dx + 4 * dy < least) {
        least = dx + 4 * dy;
        best = k;
      }
    });
    if (best >= 0) this.select(best);
  }

  zoom(factor, x = this.svg.clientWidth / 2, y = this.svg.clientHeight / 2) {
    const scale = Math.min(NEAREST, Math.max(FARTHEST, this.at.scale * factor));
    const k = scale / this.at.scale;
    this.to({ x: x - (x - this.at.x) * k, y: y - (y - this.at.y) * k, scale });
  }

  // All of a picture; or of one that could not be read then, its top.
  fit(all = false) {
    const [width, height] = this.picture.size;
    const { clientWidth: w, clientHeight: h } = this.svg;
    const whole = Math.min((w - 40) / width, (h - 40) / height, 1.2);
    const scale = all ? whole : Math.max(whole, Math.min(Math.max((w - 40) / width, 0.5), 0.8));
    const top = this.picture.nodes.filter((n) => n[1] * scale < h).map((n) => middle(n).x);
    const centre = width * scale <= w ? width / 2 : (Math.min(...top) + Math.max(...top)) / 2;
    this.to({ x: w / 2 - centre * scale, y: Math.max(20, (h - height * scale) / 2), scale });
    this.moved = false;
  }

  visible(k) {
    const { x, y } = middle(this.picture.nodes[k]);
    const { scale } = this.at;
    const [u, v] = [this.at.x + x * scale, this.at.y + y * scale];
    return scale >= UNREADABLE && u > 60 && v > 40 && u < this.svg.clientWidth - 60 && v < this.svg.clientHeight - 40;
  }

  // Moves a node into view, if it is not.
  centre(k) {
    if (this.visible(k)) return;
    const { x, y } = middle(this.picture.nodes[k]);
    const scale = Math.max(this.at.scale, 0.7);
    const moved = this.moved;
    this.to({ x: this.svg.clientWidth / 2 - x * scale, y: this.svg.clientHeight / 2 - y * scale, scale });
    this.moved = moved;
  }

  to(at) {
    this.at = at;
    this.moved = true;
    this.view.setAttribute("transform", `translate(${at.x},${at.y}) scale(${at.scale})`);
    this.view.classList.toggle("far", at.scale < UNREADABLE);
  }
}

const middle = ([x, y, width, height]) => ({ x: x + width / 2, y: y + height / 2 });

// A path through points that leaves and enters each from above.
function way(points) {
  let path = `M${points[0]} ${points[1]}`;
  for (let k = 2; k < points.length; k += 2) {
    const [x, y, u, v] = points.slice(k - 2, k + 2);
    const bend = (v - y) / 2;
    path += x === u ? `V${v}` : `C${x} ${y + bend} ${u} ${v - bend} ${u} ${v}`;
  }
  return path;
}
