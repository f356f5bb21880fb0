"use strict";
(() => {
  const COLORS = ["#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#eeca3b", "#ff9da6", "#79706e"];
  const AXES = {step: "step", rollouts: "rollouts", tokens: "tokens trained on", hours: "hours at work"};
  const CONFIG = {responsive: true, displayModeBar: false};  // dragging zooms, a double click takes it back
  const data = JSON.parse(document.getElementById("data").textContent);
  const find = (id) => document.getElementById(id);

  // Plotly reads a little HTML, and TeX between dollars, in the texts it is given; a label is text.
  const CODES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "$": "&#36;"};
  const plain = (text) => text.replace(/[&<>$]/g, (letter) => CODES[letter]);

  function add(parent, tag, name, text) {
    const made = document.createElement(tag);
    if (name) made.className = name;
    if (text !== undefined) made.textContent = text;
    parent.appendChild(made);
    return made;
  }

  function layout(x, y, more) {
    const grid = {gridcolor: "#edf0f4", zeroline: false, automargin: true, exponentformat: "e"};
    return Object.assign({
      margin: {l: 50, r: 10, t: 8, b: 40}, paper_bgcolor: "#fff", plot_bgcolor: "#fff", hovermode: "x unified",
      font: {size: 11, color: "#1c2430"}, xaxis: {...grid, nticks: 7, title: {text: x}}, yaxis: {...grid, title: {text: plain(y)}},
      legend: {orientation: "h", y: 1.02, yanchor: "bottom", x: 0, traceorder: "normal"},
    }, more);
  }

  function draw(chart, panel, axis) {
    const isOne = new Set(panel.traces.map((trace) => trace.number)).size === 1;
    const traces = panel.traces.map((trace) => ({
      x: trace.x[axis], y: trace.y, name: plain(trace.label), legendgroup: trace.number,
      showlegend: !isOne && trace.kind !== "seed", opacity: trace.kind === "seed" ? 0.4 : 1,
      hoverinfo: trace.kind === "seed" ? "skip" : "all",
      mode: trace.y.length <= 40 && trace.kind !== "seed" ? "lines+markers" : "lines",
      line: {color: COLORS[trace.number % COLORS.length], width: trace.kind === "seed" ? 1 : 2}, marker: {size: 5},
    }));
    Plotly.react(chart, traces, layout(AXES[axis], panel.unit), CONFIG);
  }

  function addPanel(parent, panel) {
    const box = add(parent, "div", "panel");
    add(box, "h3", "", panel.name);
    add(box, "div", "soft", panel.explanation);
    return add(box, "div", "chart");
  }

  function showPanels() {
    const axis = find("axis");
    const shown = [...data.panels.map((panel) => [panel, addPanel(find("panels"), panel)])];
    if (find("staleness")) {
      shown.push(...data.staleness.map((panel) => [panel, addPanel(find("staleness"), panel)]));
    }
    const refresh = () => shown.forEach(([panel, chart]) => draw(chart, panel, axis.value));
    axis.addEventListener("change", refresh);
    refresh();
  }

  function showPhases() {
    if (!find("phases")) return;
    const traces = data.phases.map((phase, number) => ({
      type: "bar", name: plain(phase.name), x: data.phase_steps, y: phase.values, marker: {color: COLORS[number]},
    }));
    Plotly.newPlot(find("phases"), traces, layout("step", "s", {barmode: "stack", bargap: 0.1}), CONFIG);
  }

  function showAnyMetric() {
    const choice = find("metric");
    if (!choice) return;
    data.metrics.forEach((panel) => add(choice, "option", "", panel.name));
    const refresh = () => {
      const box = find("any");
      box.replaceChildren();
      const panel = data.metrics[choice.selectedIndex];
      draw(addPanel(box, panel), panel, "step");
    };
    choice.addEventListener("change", refresh);
    if (data.metrics.length) refresh();
  }

  const FILTERS = ["word", "purpose", "pick", "status", "step", "low", "high"];
  const PAGE = 20;

  function matches(rollout, wanted) {
    const texts = [rollout.prompt, rollout.response, rollout.reason, rollout.label];
    return (!wanted.word || texts.some((text) => text.toLowerCase().includes(wanted.word.toLowerCase())))
      && ["purpose", "pick", "status"].every((name) => !wanted[name] || rollout[name] === wanted[name])
      && (wanted.step === "" || rollout.step === Number(wanted.step))
      && (wanted.low === "" || rollout.reward >= Number(wanted.low))
      && (wanted.high === "" || rollout.reward <= Number(wanted.high));
  }

  function addRollout(parent, rollout) {
    const isBad = rollout.status === "failed" || rollout.status === "aborted";
    const box = add(parent, "div", isBad ? "rollout failed" : "rollout");
    const top = add(box, "div", "top");
    add(top, "b", "", `reward ${Number(rollout.reward.toPrecision(4))}`);
    const turns = rollout.num_turns > 1 ? `, last of ${rollout.num_turns} turns` : "";
    [`${rollout.purpose === "eval" ? "evaluation" : "training"}, step ${rollout.step}`, rollout.pick, rollout.status,
      `${rollout.num_response_tokens} tokens${turns}`, `prompt ${rollout.prompt_index}`, rollout.dataset,
    ].forEach((text) => add(top, "span", "", text));
    if (rollout.reason) add(box, "pre", "reason", rollout.reason);
    const texts = add(box, "div", "texts");
    const left = add(texts, "div");
    add(left, "h4", "", "prompt");
    add(left, "pre", "", rollout.prompt);
    if (rollout.label) {
      add(left, "h4", "", "label");
      add(left, "pre", "", rollout.label);
    }
    const right = add(texts, "div");
    add(right, "h4", "", "response");
    add(right, "pre", "", rollout.response);
  }

  // What is asked for stands in the address too, so that it can be sent and found again.
  function showRollouts() {
    if (!find("rollouts")) return;
    [...new Set(data.rollouts.map((rollout) => rollout.step))].forEach((step) => add(find("step"), "option", "", step));
    const asked = new URLSearchParams(location.hash.slice(1));
    FILTERS.forEach((name) => { if (asked.has(name)) find(name).value = asked.get(name); });
    let numShown = PAGE;
    const refresh = () => {
      const wanted = Object.fromEntries(FILTERS.map((name) => [name, find(name).value]));
      const set = Object.entries(wanted).filter(([, value]) => value !== "");
      history.replaceState(null, "", `#${new URLSearchParams(set)}`);
      const found = data.rollouts.filter((rollout) => matches(rollout, wanted));
      find("count").textContent = `${found.length} of ${data.rollouts.length}`;
      find("rollouts").replaceChildren();
      found.slice(0, numShown).forEach((rollout) => addRollout(find("rollouts"), rollout));
      find("more").hidden = found.length <= numShown;
    };
    FILTERS.forEach((name) => find(name).addEventListener("input", () => { numShown = PAGE; refresh(); }));
    find("more").addEventListener("click", () => { numShown += PAGE; refresh(); });
    refresh();
  }

  showPanels();
  showPhases();
  showAnyMetric();
  showRollouts();
})();
