// Scripted experts and perception labels for MiniWoB++ pages; evaluated once in each page, before its first episode.
//
// `dartrlExpert.action(family, instruction)` is the next correct action as a function of the DOM alone, never of the history,
// so it also answers from states that the expert would not have reached. Boxes are [left, top, width, height] in CSS pixels.
//   {kind: "click", label, box}   {kind: "type", label, text}   {kind: "drag", label, box, to}   {kind: "scroll", label, box, direction}
// `dartrlExpert.elements()` lists what can be pointed at: [label, left, top, width, height, kind], kind "word" for plain words.
(() => {
  const WIDTH = 168, HEIGHT = 224, TOP = 50;
  const one = (selector) => document.querySelector(selector);
  const all = (selector) => [...document.querySelectorAll(selector)];
  const round = (value) => Math.round(value * 10) / 10;
  const boxOf = (element) => {
    const r = element.getBoundingClientRect();
    return [r.left, r.top, r.width, r.height].map(round);
  };
  const center = ([left, top, width, height]) => [left + width / 2, top + height / 2];
  const around = (x, y, reach) => [round(x - reach), round(y - reach), 2 * reach, 2 * reach];
  const isHit = (element, box) => {
    const found = document.elementFromPoint(...center(box));
    return Boolean(found) && (found === element || element.contains(found) || found.contains(element));
  };
  const isVisible = (element) => {
    const box = boxOf(element);
    const [left, top, width, height] = box;
    return width >= 4 && height >= 4 && left >= 0 && top >= TOP - 2 && left + width <= WIDTH && top + height <= HEIGHT && isHit(element, box);
  };
  const text = (element) => element.innerText.trim();
  const withText = (selector, wanted) => all(selector).find((element) => text(element) === wanted && isVisible(element));
  const textBoxes = () => all("#area input").filter((element) => ["text", "password", "input"].includes(element.getAttribute("type") || "text"));
  const ordinal = (index) => ["1st", "2nd", "3rd"][index] || `${index + 1}th`;

  const SHAPES = { rect: "rectangle", circle: "circle", polygon: "triangle" };
  const svgText = (element) => element.textContent.trim();
  const shapeLabel = (element) => {
    const kind = SHAPES[element.tagName] || svgText(element);
    const color = element.getAttribute("fill");
    return color && !color.startsWith("#") ? `${color} ${kind}` : kind;
  };

  // ------------------------------------------------------------------ labels

  const inputLabel = (element) => {
    const type = element.getAttribute("type") || "text";
    if (type === "radio" || type === "checkbox") {
      const parent = element.parentElement;
      return (parent && parent.tagName === "LABEL" && text(parent)) || type;
    }
    const boxes = textBoxes();
    return boxes.length > 1 ? `${ordinal(boxes.indexOf(element))} textbox` : "textbox";
  };
  const labelOf = (element) => {
    const tag = element.tagName;
    if (tag === "BUTTON") return element.classList.contains("ui-dialog-titlebar-close") ? "x" : text(element) || "button";
    if (tag === "INPUT") return inputLabel(element);
    if (tag === "TEXTAREA") return "textarea";
    if (element.dataset && element.dataset.color) return element.dataset.color;
    if (element.classList.contains("plot-point")) return element.id;
    if (element.namespaceURI === "http://www.w3.org/2000/svg") return shapeLabel(element);
    if (element.id === "draggableSmall") return "small box";
    if (element.id === "draggableLarge") return "large box";
    return text(element);
  };
  const TARGETS = "#wrap button,.ui-dialog button,#area input,#area textarea,#area .color,#area span[data-color],.alink,#area a,#area h3,"
    + "circle,rect,polygon,svg text,#draggableSmall,#draggableLarge";
  const targets = () => all(TARGETS).filter(isVisible).map((element) => [labelOf(element), ...boxOf(element), element.tagName.toLowerCase()]);
  const words = () => {
    const found = [];
    const query = one("#query"), rewards = one("#reward-display");
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      const parent = node.parentElement;
      if (!parent || ["SCRIPT", "STYLE"].includes(parent.tagName) || (query && query.contains(node)) || (rewards && rewards.contains(node))) continue;
      for (const match of node.data.matchAll(/\S+/g)) {
        const range = document.createRange();
        range.setStart(node, match.index);
        range.setEnd(node, match.index + match[0].length);
        const r = range.getBoundingClientRect(), box = [r.left, r.top, r.width, r.height].map(round);
        const inside = r.width >= 3 && r.left >= 0 && r.right <= WIDTH && r.top >= TOP - 2 && r.bottom <= HEIGHT - 2;
        if (inside && isHit(parent, box)) found.push([match[0], ...box, "word"]);
      }
    }
    return found;
  };

  // ------------------------------------------------------------------ actions

  const click = (label, element) => element && { kind: "click", label, box: boxOf(element) };
  const drag = (label, box, to) => ({ kind: "drag", label, box, to });
  const submit = (label = "Submit") => click(label, all("#area button").find((element) => text(element) === label));
  const fill = (element, value) => {
    if (element.value === value) return null;
    if (document.activeElement !== element) return click(labelOf(element), element);
    return { kind: "type", label: "type", text: value };
  };
  const quoted = (instruction) => [...instruction.matchAll(/"(.*?)"/g)].map((match) => match[1]);
  const clickQuoted = (selector) => (instruction) => {
    const [wanted] = quoted(instruction);
    return click(wanted, withText(selector, wanted));
  };
  const enterText = (instruction) => fill(one("#tt"), quoted(instruction)[0]) || submit();
  const login = (instruction) => {
    const [user, password] = quoted(instruction);
    const button = one("#subbtn");
    return fill(one("#username"), user) || fill(one("#password"), password) || click(text(button), button);
  };

  const SHIFTS = { left: [-1, 0], right: [1, 0], up: [0, -1], down: [0, 1] };
  const dragShape = (instruction) => {
    const direction = instruction.match(/(left|right|up|down)/)[1];
    const shape = one("svg circle, svg rect, svg polygon");
    const now = shapes.gridCoords(shape), before = shape.getBBox();
    const [dx, dy] = SHIFTS[direction];
    if ((now.x - before.x) * dx + (now.y - before.y) * dy > 0) return submit();
    const box = boxOf(shape);
    const [x, y] = center(box);
    const to = [Math.min(152, Math.max(8, x + 36 * dx)), Math.min(172, Math.max(58, y + 36 * dy))];
    return drag(`${SHAPES[shape.tagName]} ${direction}`, box, around(...to, 8));
  };
  const dragBox = () => {
    if (smallBoxContained()) return submit();
    const large = boxOf(one("#draggableLarge"));
    return drag("small box", boxOf(one("#draggableSmall")), around(...center(large), 14));
  };
  // The page measures the distance to the corner of the dot's bounding box, 4 px up and left of the centre that one sees.
  const drawLine = (instruction) => {
    const [x, y] = center(boxOf(one("#circ"))).map((value) => value - 4), path = one("svg path");
    const isHorizontal = instruction.includes("horizontal");
    if (path && path.getAttribute("d")) {
      const [left, top, width, height] = boxOf(path);
      const [length, thickness] = isHorizontal ? [width, height] : [height, width];
      const error = isHorizontal ? top + height / 2 - y : left + width / 2 - x;
      if (length > 40 && thickness < 6 && Math.abs(error) < 4) return submit();
    }
    const [dx, dy] = isHorizontal ? [28, 0] : [0, 28];
    return drag(isHorizontal ? "horizontal" : "vertical", around(x - dx, y - dy, 4), around(x + dx, y + dy, 4));
  };
  const resizeArea = (instruction) => {
    const area = $("#tt").resizable("instance");
    const [, dimension, change] = instruction.match(/the (width|height) is (smaller|larger)/);
    const sign = change === "larger" ? 1 : -1, before = area.originalSize || {};
    if (before.width && sign * (area.size[dimension] - before[dimension]) > 0) return submit();
    const [x, y] = center(boxOf(one(".ui-resizable-se")));
    const [dx, dy] = dimension === "width" ? [16 * sign, 0] : [0, 16 * sign];
    return drag(`${dimension} ${change}`, around(x, y, 4), around(x + dx, y + dy, 6));
  };
  const highlightText = () => {
    const paragraph = one("#randomText"), squeeze = (value) => value.replace(/\s/g, "");
    if (squeeze(window.getSelection().toString()) === squeeze(paragraph.textContent)) return submit();
    const range = document.createRange();
    range.selectNodeContents(paragraph);
    const lines = [...range.getClientRects()].filter((r) => r.width > 1);
    const first = lines[0], last = lines[lines.length - 1];
    return drag("text", around(first.left + 1, first.top + first.height / 2, 3), around(last.right + 4, last.top + last.height / 2, 4));
  };
  const scrollArea = (instruction) => {
    const area = one("#text-area"), toBottom = instruction.includes("bottom");
    const rest = toBottom ? area.scrollHeight - area.scrollTop - area.clientHeight : area.scrollTop;
    if (rest < 5) return submit();
    return { kind: "scroll", label: "textarea", box: boxOf(area), direction: toBottom ? "down" : "up" };
  };
  const checkboxes = (instruction) => {
    const wanted = instruction.match(/Select (.*) and click/)[1].split(", ");
    for (const label of all("#boxes label")) {
      const box = label.querySelector("input");
      if (box.checked !== wanted.includes(text(label))) return click(text(label), box);
    }
    return submit();
  };
  const shades = (instruction) => {
    const wanted = instruction.match(/shades of (\w+)/)[1];
    const wrong = all("#area span").find((span) => (span.dataset.color === wanted) !== (span.getAttribute("class") === "selected"));
    return wrong ? click(wrong.dataset.color, wrong) : submit();
  };
  const shapeOnGrid = (instruction) => {
    const description = instruction.match(/Click on an? (.*?)\.?$/)[1], parts = description.split(" ");
    const matches = (element) => parts.every((part) => {
      const isText = element.tagName === "text", value = svgText(element);
      const size = isText ? parseFloat(element.getAttribute("font-size")) : element.getBBox().width;
      if (part === "large" || part === "small") return (size > 15) === (part === "large");
      if (shapes.COLORS.includes(part)) return element.getAttribute("fill") === part;
      if (part === "item") return true;
      if (part === "shape") return !isText;
      if (part === "letter") return isText && /[a-z]/i.test(value);
      if (part === "digit") return isText && /\d/.test(value);
      return part === (isText ? value : SHAPES[element.tagName]);
    });
    return click(description, all("#area_svg > *").find((element) => matches(element) && isHit(element, boxOf(element))));
  };
  const figure = () => {
    const shape = one("#area_svg > *");
    const kind = SHAPES[shape.tagName] || (/\d/.test(svgText(shape)) ? "digit" : "letter");
    const button = one(`#area-buttons button[data-type='${kind}']`);
    return click(text(button), button);
  };

  const EXPERTS = {
    "click-button": clickQuoted("#area button"),
    "click-button-sequence": () => (buttonsPushed.length === 0 ? click("ONE", one("#subbtn")) : click("TWO", one("#subbtn2"))),
    "click-checkboxes": checkboxes,
    "click-collapsible": () => (all(".ui-accordion-content").some((element) => element.offsetHeight > 0) ? submit() : click("Section", one("#area h3"))),
    "click-color": (instruction) => {
      const color = instruction.match(/the (\S+) colored/)[1];
      return click(color, one(`#area .color[data-color='${color}']`));
    },
    "click-dialog-2": (instruction) => {
      const [wanted] = quoted(instruction);
      return click(wanted, wanted === "x" ? one(".ui-dialog-titlebar-close") : withText(".ui-dialog-buttonset button", wanted));
    },
    "click-link": clickQuoted(".alink"),
    "click-option": (instruction) => {
      const wanted = instruction.match(/Select (.*) and click/)[1];
      const option = all("#area label").find((label) => text(label) === wanted).querySelector("input");
      return option.checked ? submit() : click(wanted, option);
    },
    "click-shades": shades,
    "click-shape": shapeOnGrid,
    "click-tab": (instruction) => {
      const [, index] = instruction.match(/#(\d)/);
      return click(`Tab #${index}`, one(`a[href='#tabs-${index}']`));
    },
    "click-test": () => click("Click Me!", one("#subbtn")),
    "click-test-2": () => click("ONE", one("#subbtn")),
    "click-widget": (instruction) => {
      const [kind] = quoted(instruction);
      return click(kind, all(`#area [data-type='${kind}']`).find(isVisible));
    },
    "drag-box": dragBox,
    "drag-circle": dragShape,
    "drag-single-shape": dragShape,
    "draw-line": drawLine,
    "enter-password": (instruction) => {
      const [password] = quoted(instruction);
      return fill(one("#password"), password) || fill(one("#verify"), password) || submit();
    },
    "enter-text": enterText,
    "enter-text-dynamic": enterText,
    "focus-text": () => click("textbox", one("#tt")),
    "focus-text-2": (instruction) => {
      const [, index] = instruction.match(/(\d)/);
      return click(`${ordinal(index - 1)} textbox`, one(`#tt${index}`));
    },
    "grid-coordinate": (instruction) => {
      const [point] = instruction.match(/\(.*\)/);
      return click(point, document.getElementById(point));
    },
    "highlight-text": highlightText,
    "identify-shape": figure,
    "login-user": login,
    "login-user-popup": (instruction) => (one("#popup") ? click("Cancel", one("#popup-cancel")) : login(instruction)),
    "resize-textarea": resizeArea,
    "scroll-text-2": scrollArea,
  };

  window.dartrlExpert = {
    families: Object.keys(EXPERTS),
    action: (family, instruction) => EXPERTS[family](instruction) || null,
    elements: () => [...targets(), ...words()],
  };
})();
