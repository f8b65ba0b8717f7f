"use strict";
// The page is whole without this. It tells what is pointed at, and looks closer at the run.

const SVG = "http://www.w3.org/2000/svg";

function titleOf(target) {
  const own = target.querySelector(":scope > title") || target.closest("a, .layers > svg")?.querySelector("title");
  return own ? own.textContent : "";
}

for (const picture of document.querySelectorAll("#layout-picture")) {
  const readout = picture.querySelector(".readout");
  for (const kind of ["pointerover", "focusin"]) {
    picture.addEventListener(kind, (event) => { readout.textContent = titleOf(event.target) || readout.textContent; });
  }
}

const timeline = document.getElementById("timeline");
if (timeline) showRun(timeline, Number(timeline.dataset.total), Number(timeline.dataset.cells));

function showRun(timeline, total, cells) {
  const tracks = timeline.querySelectorAll(".track");
  const layers = timeline.querySelectorAll(".layers > svg");
  const axis = timeline.querySelector(".axis");
  const moment = document.getElementById("moment");
  const moves = document.getElementById("moves");
  const least = total / cells * 20; // twenty cells over the whole width
  let begin = 0, span = total; // what is shown, in microseconds

  function timeText(us) {
    const [unit, size] = span >= 2e6 ? ["s", 1e6] : span >= 2e3 ? ["ms", 1e3] : ["µs", 1];
    const digits = Math.max(0, Math.ceil(Math.log10(size / span)) + 2);
    return (us / size).toFixed(digits) + " " + unit;
  }

  function show(newBegin, newSpan) {
    span = Math.min(total, Math.max(least, newSpan));
    begin = Math.min(total - span, Math.max(0, newBegin));
    const scale = cells / total;
    for (const track of tracks) track.setAttribute("viewBox", `${begin * scale} 0 ${span * scale} 1`);
    for (const layer of layers) {
      // Cut to what is shown, so that the number stands in the middle of that.
      const from = Math.max(begin, Number(layer.dataset.begin)), to = Math.min(begin + span, Number(layer.dataset.end));
      layer.setAttribute("x", 100 * (from - begin) / span + "%");
      layer.setAttribute("width", 100 * Math.max(0, to - from) / span + "%");
      let text = layer.querySelector("text");
      if (!text && (to - from) / span > 0.015) {
        text = mark("text", { x: "50%", y: 14, "text-anchor": "middle" }, layer.querySelector("title").textContent.match(/\d+/)[0]);
        layer.append(text);
      }
      if (text) text.setAttribute("visibility", (to - from) / span > 0.015 ? "visible" : "hidden");
    }
    axis.replaceChildren(...ticks());
  }

  function mark(name, attributes, text) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.textContent = text || "";
    return made;
  }

  function* ticks() {
    const rough = span / Math.max(3, Math.min(8, axis.clientWidth / 90));
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough * 0.999);
    for (let at = Math.ceil(begin / step) * step; at <= begin + span; at += step) {
      const share = (at - begin) / span, place = 100 * share + "%";
      yield mark("line", { x1: place, x2: place, y1: 0, y2: 5 });
      const anchor = share < 0.03 ? "start" : share > 0.97 ? "end" : "middle";
      yield mark("text", { x: place, y: 17, "text-anchor": anchor }, timeText(at));
    }
  }

  function zoom(factor, at = begin + span / 2) {
    const newSpan = Math.min(total, Math.max(least, span * factor));
    show(at - (at - begin) * newSpan / span, newSpan);
  }

  const actions = {
    in: () => zoom(0.5), out: () => zoom(2), all: () => show(0, total),
    left: () => show(begin - span / 4, span), right: () => show(begin + span / 4, span),
  };
  const keys = { "+": "in", "=": "in", "-": "out", "0": "all", ArrowLeft: "left", ArrowRight: "right" };
  moves.hidden = false;
  moves.addEventListener("click", (event) => actions[event.target.dataset.move]?.());
  timeline.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    event.preventDefault();
    actions[keys[event.key]]();
  });

  function timeAt(event) {
    const box = axis.getBoundingClientRect();
    return begin + span * Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
  }
  timeline.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return; // the wheel alone scrolls the page
    event.preventDefault();
    zoom(2 ** (Math.sign(event.deltaY) / 2), timeAt(event));
  }, { passive: false });

  let held = null; // the time that is under the pointer while it drags
  timeline.addEventListener("pointerdown", (event) => { held = timeAt(event); timeline.setPointerCapture(event.pointerId); });
  for (const kind of ["pointerup", "pointercancel"]) timeline.addEventListener(kind, () => { held = null; });
  timeline.addEventListener("pointermove", (event) => {
    if (held !== null) show(begin + held - timeAt(event), span);
    const said = titleOf(event.target) || event.target.getAttribute("aria-label") || "";
    moment.textContent = `at ${timeText(timeAt(event))}` + (said && event.target !== timeline ? `: ${said}` : "");
  });
  addEventListener("resize", () => show(begin, span));
  show(0, total);
}
