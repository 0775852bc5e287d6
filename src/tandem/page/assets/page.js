// Draws every chart of the page, switches colours, and follows a run that `tandem watch` serves.

const observer = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const state = charts.find((one) => one.plot === target);
    if (state && Math.abs(target.clientWidth - state.width) > 1) state.redraw();
  }
});

function mountCharts() {
  observer.disconnect();
  charts.length = 0;
  const specs = JSON.parse(document.getElementById('page-data').textContent).charts;
  for (const figure of document.querySelectorAll('figure[data-chart]')) {
    const chart = specs.find((one) => one.id === figure.dataset.chart);
    const plot = figure.querySelector('.plot');
    if (!chart || !plot) continue;
    const state = { plot, hidden: new Set(), width: 0, markStep: null };
    state.redraw = (pressed) => {
      state.width = plot.clientWidth;
      plot.replaceChildren();
      KINDS[chart.kind](plot, chart, state);
      if (pressed !== undefined) plot.querySelectorAll('.legend button')[pressed].focus();
    };
    charts.push(state);
    state.redraw();
    observer.observe(plot);
  }
  document.documentElement.dataset.drawn = String(charts.length);
}

const remembered = {  // a browser may refuse storage to a local file
  get: () => { try { return localStorage.getItem('tandem-theme'); } catch { return null; } },
  set: (theme) => { try { localStorage.setItem('tandem-theme', theme); } catch { /* chosen for this view only */ } },
};

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
}

function labelTheme() {
  const button = document.getElementById('theme');
  button.textContent = isDark() ? 'Light' : 'Dark';
  button.setAttribute('aria-pressed', String(isDark()));
}

document.addEventListener('click', (event) => {
  if (event.target.id !== 'theme') return;
  document.documentElement.dataset.theme = isDark() ? 'light' : 'dark';
  remembered.set(document.documentElement.dataset.theme);
  labelTheme();
});
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', labelTheme);

// The page of a live run is fetched again when the run has written something; what the reader opened stays open.
async function follow() {
  let version = '';
  for (;;) {
    try {
      const found = await (await fetch('/version', { cache: 'no-store' })).text();
      if (version && found !== version) await replacePage();
      version = found;
      document.body.classList.remove('lost');
    } catch {
      document.body.classList.add('lost');
    }
    await new Promise((resolve) => { setTimeout(resolve, 2000); });
  }
}

async function replacePage() {
  const answer = await (await fetch('/', { cache: 'no-store' })).text();
  const fresh = new DOMParser().parseFromString(answer, 'text/html');
  if (!fresh.querySelector('main')) return;
  const name = (details) => details.querySelector('summary').textContent.replace(/[0-9,]+/g, '');
  const open = new Map([...document.querySelectorAll('details')].map((one) => [name(one), one.open]));
  for (const part of ['header', 'main', '#page-data']) document.querySelector(part).replaceWith(fresh.querySelector(part));
  document.title = fresh.title;
  for (const one of document.querySelectorAll('details')) if (open.has(name(one))) one.open = open.get(name(one));
  labelTheme();
  mountCharts();
}

if (remembered.get() === 'dark' || remembered.get() === 'light') document.documentElement.dataset.theme = remembered.get();
labelTheme();
mountCharts();
if (document.body.hasAttribute('data-live')) follow();
