// The slider from the captured program to the plan, and what is said of the operator that is chosen.
const GUIDE =
  "Choose an operator to see what it makes, who holds it, what it costs and which of your lines it is from. Drag to move; ctrl " +
  "and wheel, or + and −, zoom; arrow keys walk along edges. Framed in red: a change of type that communicates.";
const NEIGHBOURS = 12;

class Steps {
  constructor() {
    this.last = report.frames.length - 1;
    this.here = this.last;
    this.graph = new Graph(at("picture"), (k) => this.about(k));
    const { last } = this;
    this.slider = make("input", { type: "range", id: "slider", min: 0, max: last, value: last, "aria-label": "Step" });
    this.slider.addEventListener("input", () => this.step(Number(this.slider.value)));
    this.text = make("div", { class: "step", "aria-live": "polite" });
    this.unfold = make("input", { type: "checkbox", id: "unfold", onchange: () => this.step(last) });
    this.search = make("input", {
      type: "search",
      placeholder: "find an operator or a line",
      "aria-label": "Find",
      oninput: () => this.find(),
      onkeydown: (e) =>
        e.key === "Enter" && this.graph.select(this.graph.elements.findIndex((n) => n.classList.contains("lit"))),
    });
    this.back = make("button", { onclick: () => this.step(this.here - 1), "aria-label": "Step back" }, "‹");
    this.on = make("button", { onclick: () => this.step(this.here + 1), "aria-label": "Next step" }, "›");
    at("steps").append(make("div", { class: "bar" }, this.back, this.slider, this.on), this.text, this.tools());
  }

  tools() {
    const whole = () => (document.fullscreenElement ? document.exitFullscreen() : at("picture").requestFullscreen());
    return make(
      "div",
      { class: "bar" },
      this.search,
      make("span", { class: "fill" }),
      report.whole ? make("label", { for: "unfold" }, this.unfold, "every layer") : null,
      make("button", { "aria-label": "Zoom out", onclick: () => this.graph.zoom(1 / 1.3) }, "−"),
      make("button", { "aria-label": "Zoom in", onclick: () => this.graph.zoom(1.3) }, "+"),
      make("button", { onclick: () => this.graph.fit(true) }, "all"),
      make("button", { onclick: whole }, "full screen"),
    );
  }

  step(k) {
    this.here = Math.min(this.last, Math.max(0, k));
    const frame = report.frames[this.here];
    const end = this.here === this.last;
    this.slider.value = this.here;
    this.slider.setAttribute("aria-valuetext", frame.title);
    [this.back.disabled, this.on.disabled, this.unfold.disabled] = [this.here === 0, end, !end];
    this.graph.show(end && this.unfold.checked ? report.whole : report.pictures[frame.picture], frame.marked);
    this.text.replaceChildren(
      make("p", { class: "quiet" }, `step ${this.here} of ${this.last}`),
      make("h3", {}, frame.title),
      ...(end || !frame.uses.length ? [make("p", {}, frame.says)] : []),
      ...frame.uses.map(ruleUse),
      ...(frame.difference ? [make("p", { class: "difference" }, frame.difference)] : []),
    );
    this.find();
  }

  // Lights what the search and the legend ask for.
  find() {
    const wanted = this.search.value.trim().toLowerCase();
    const chosen = document.querySelector("#legend [aria-pressed=true]");
    const tint = chosen && Number(chosen.dataset.colour);
    const has = (text) => text.toLowerCase().includes(wanted);
    const named = (n) => has(said(n[4])) || has(said(n[5])) || said(n[9]).some(([, text]) => has(text));
    this.graph.light(wanted || chosen ? (n) => (!wanted || named(n)) && (!chosen || n[7] === tint) : null);
  }

  about(k) {
    if (k === null) return at("about").replaceChildren(make("h3", {}, "The graph"), make("p", { class: "quiet" }, GUIDE));
    const { picture, operands, readers } = this.graph;
    const node = picture.nodes[k];
    const parts = [...this.links("reads", operands[k]), ...this.links("is read by", readers[k])];
    at("about").replaceChildren(make("h3", {}, said(node[4])), terms(said(node[9])), ...parts);
  }

  links(title, found) {
    if (!found.size) return [];
    const link = (k) => make("button", { onclick: () => this.graph.select(k) }, said(this.graph.picture.nodes[k][4]));
    const more = found.size > NEIGHBOURS ? ` and ${found.size - NEIGHBOURS} more` : "";
    return [make("h3", {}, title), make("div", { class: "bar" }, ...[...found].slice(0, NEIGHBOURS).map(link), more)];
  }
}

function ruleUse(use) {
  const where = use.lines.length ? `, ${use.lines.join(", ")}` : "";
  return make("p", { class: "rule" }, make("code", {}, use.says), ` ${use.times} ×${where}`);
}

// What the colours mean; pressed, an entry lights what has its colour.
function showLegend(changed) {
  const others = 8;
  const used = new Set(report.pictures.flatMap((p) => p.nodes.map((n) => n[7])));
  const named = report.legend.map((name, k) => [k, name, `--c${k}`]);
  const entries = [[-1, "whole on every device", "--whole"], ...named, [others, "other ways", `--c${others}`]];
  const press = ({ currentTarget: button }) => {
    const was = button.getAttribute("aria-pressed") === "true";
    for (const other of at("legend").children) other.setAttribute("aria-pressed", "false");
    button.setAttribute("aria-pressed", String(!was));
    changed();
  };
  for (const [k, name, tint] of entries.filter(([k]) => used.has(k))) {
    const attributes = { "data-colour": k, "aria-pressed": "false", onclick: press };
    at("legend").append(make("button", attributes, swatch(`var(${tint})`), name));
  }
}

function showSteps() {
  const steps = new Steps();
  showLegend(() => steps.find());
  steps.step(steps.last);
}
