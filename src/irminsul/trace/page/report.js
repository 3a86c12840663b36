"use strict";
(() => {
  const strips = JSON.parse(document.getElementById("data").textContent);
  const canvas = document.getElementById("strips");
  const detail = document.getElementById("detail");
  const names = ["prefix", "shifted", "computed", "approximate"];
  const rowHeight = 4;
  const barHeight = 3;
  const margin = 4;
  // One huge prompt must not make all others too small to see: the longest 2 % are cut at the edge.
  const lengths = strips.map((strip) => strip.tokens).sort((a, b) => a - b);
  const longest = Math.max(1, lengths[Math.ceil(0.98 * lengths.length) - 1]);
  const number = new Intl.NumberFormat("en");
  let chosen = -1;

  function draw() {
    const width = canvas.clientWidth;
    const height = strips.length * rowHeight + 2 * margin;
    const scale = window.devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const style = getComputedStyle(document.documentElement);
    const colours = names.map((name) => style.getPropertyValue(`--${name}`).trim());
    const ink = style.getPropertyValue("--ink").trim();
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    const unit = (width - 2 * margin) / longest;
    strips.forEach((strip, row) => {
      const y = margin + row * rowHeight;
      for (const [kind, start, end] of strip.segments) {
        if (start >= longest) break;
        context.fillStyle = colours[kind];
        context.fillRect(margin + start * unit, y, Math.max((Math.min(end, longest) - start) * unit, 0.5), barHeight);
      }
      if (row === chosen) {
        context.strokeStyle = ink;
        context.strokeRect(margin - 1.5, y - 1, Math.min(strip.tokens, longest) * unit + 3, barHeight + 2);
      }
    });
  }

  function describe(strip) {
    const sums = [0, 0, 0, 0];
    let runs = 0;
    let farthest = 0;
    for (const [kind, start, end, delta] of strip.segments) {
      sums[kind] += end - start;
      runs += kind === 1;
      farthest = Math.max(farthest, kind === 1 ? Math.abs(delta) : 0);
    }
    const parts = names.map((name, kind) => `${name} ${number.format(sums[kind])}`);
    const moved = runs ? `; ${number.format(runs)} runs, moved by up to ${number.format(farthest)}` : "";
    const scope = strip.namespace === "default" ? "" : ` (${strip.namespace})`;
    return `${strip.place}${scope}\n${number.format(strip.tokens)} tokens: ${parts.join(", ")}${moved}`;
  }

  function choose(row) {
    const next = Math.min(Math.max(row, 0), strips.length - 1);
    if (next === chosen || next < 0) return;
    chosen = next;
    detail.textContent = describe(strips[chosen]);
    draw();
  }

  const pointed = (event) => choose(Math.floor((event.offsetY - margin) / rowHeight));
  canvas.addEventListener("pointermove", pointed);
  canvas.addEventListener("pointerdown", pointed);
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    choose(chosen + step);
  });
  window.addEventListener("resize", draw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
})();
