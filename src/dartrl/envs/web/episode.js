// Runs before the scripts of every MiniWoB++ page: makes the page a closed, repeatable world with a small interface.
(() => {
  'use strict';
  if (window !== window.top) return;

  // Randomness drawn while the page loads, before an episode is seeded, is the same at every load.
  let state = 20250923;
  Math.random = () => {
    state = (state * 48271) % 2147483647;
    return state / 2147483647;
  };

  // Every episode begins at the same moment of the same day; from there the page's clock runs as usual.
  const RealDate = Date;
  const EPOCH = RealDate.UTC(2026, 0, 5, 12);
  let begun = performance.now();
  const now = () => EPOCH + Math.floor(performance.now() - begun);
  window.Date = new Proxy(RealDate, {
    construct: (target, values, self) => Reflect.construct(target, values.length ? values : [now()], self),
    apply: () => new RealDate(now()).toString(),
    get: (target, name) => (name === 'now' ? now : Reflect.get(target, name)),
  });

  // What the page still has to do of its own accord within the next frame: animation frames asked for, and short timers.
  const SHORT = 20; // milliseconds
  const due = new Set();
  const ask = window.requestAnimationFrame.bind(window);
  const unask = window.cancelAnimationFrame.bind(window);
  const start = window.setTimeout.bind(window);
  const stop = window.clearTimeout.bind(window);
  window.requestAnimationFrame = (callback) => {
    const id = ask((moment) => {
      due.delete('frame ' + id);
      callback(moment);
    });
    due.add('frame ' + id);
    return id;
  };
  window.cancelAnimationFrame = (id) => {
    due.delete('frame ' + id);
    unask(id);
  };
  window.setTimeout = (handler, delay = 0, ...values) => {
    if (typeof handler !== 'function' || delay > SHORT) return start(handler, delay, ...values);
    const id = start(() => {
      due.delete(id);
      handler.apply(window, values);
    }, delay);
    due.add(id);
    return id;
  };
  window.clearTimeout = window.clearInterval = (id) => {
    due.delete(id);
    stop(id);
  };

  const isMoving = () => due.size > 0 || Array.from(document.images).some((image) => !image.complete);

  // Nothing leaves the page: no navigation by the page or the agent, no second window.
  window.open = () => null;
  window.navigation?.addEventListener('navigate', (event) => {
    if (event.cancelable && !event.hashChange) event.preventDefault();
  });

  // No drag and drop by the system: it takes the mouse away from the page, and no page uses it.
  document.addEventListener('dragstart', (event) => event.preventDefault(), true);

  // A clipboard of its own: slots share one browser, and one real clipboard would carry text between episodes.
  let clipboard = '';
  const selectedText = () => {
    const field = document.activeElement;
    if (field && typeof field.selectionStart === 'number') {
      return field.value.slice(field.selectionStart, field.selectionEnd);
    }
    return String(window.getSelection());
  };
  for (const kind of ['copy', 'cut']) {
    document.addEventListener(kind, (event) => {
      const text = selectedText();
      if (text) clipboard = text;
      event.preventDefault();
      if (kind === 'cut') document.execCommand('delete');
    }, true);
  }
  document.addEventListener('paste', (event) => {
    event.preventDefault();
    if (clipboard) document.execCommand('insertText', false, clipboard);
  }, true);

  // The agent sees the task and nothing else; a list opens inside the page, where a screenshot shows it; nothing blinks.
  const sheet = new CSSStyleSheet();
  sheet.replaceSync(`
    #reward-display, #click-canvas, #sync-task-cover { display: none !important; }
    *, *::before, *::after { transition: none !important; animation: none !important; caret-animation: manual; }
    select:not([multiple]):not([size]), ::picker(select) { appearance: base-select; }
  `);
  document.adoptedStyleSheets = [sheet];

  const unscroll = () => {
    for (const element of document.querySelectorAll('*')) {
      if (element.scrollTop) element.scrollTop = 0;
      if (element.scrollLeft) element.scrollLeft = 0;
    }
  };

  // Build all boxes anew, so that no pixel is left over from the way in which the last picture came about.
  const redraw = () => {
    const root = document.documentElement;
    root.style.display = 'none';
    void root.offsetHeight;
    root.style.display = '';
  };

  // Dialogs first appear 300 pixels wide. In a window that is narrower jQuery UI moves them out of it to the left; in the
  // wide window that the pages were written for it moves them to the left edge, and so do we.
  const keepDialogsInside = () => {
    const fit = window.jQuery?.ui?.position?.fit;
    if (!fit || fit.isPatched) return;
    const left = fit.left;
    fit.isPatched = true;
    fit.left = function (position, data) {
      left.call(this, position, data);
      position.left = Math.max(position.left, 0);
    };
  };

  const DAY = 86400000;
  window.__episode = Object.freeze({
    // Begin the instance of a seed; [the instruction in words, the page can be used].
    reset(seed) {
      if (window.jQuery) jQuery.fx.off = true;
      keepDialogsInside();
      clipboard = '';
      begun = performance.now();
      document.activeElement?.blur();
      unscroll();
      Math.seedrandom(String(seed));
      core.EPISODE_MAX_TIME = DAY;
      core.startEpisodeReal();
      window.scrollTo(0, 0);
      redraw();
      const utterance = core.getUtterance();
      return [typeof utterance === 'string' ? utterance : utterance.utterance, Boolean(WOB_TASK_READY)];
    },
    // [the episode has ended, raw reward, the page will change by itself, the page can be used]
    state() {
      return [Boolean(WOB_DONE_GLOBAL), Number(WOB_RAW_REWARD_GLOBAL), isMoving(), Boolean(WOB_TASK_READY)];
    },
  });
})();
