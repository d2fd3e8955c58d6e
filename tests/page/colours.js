// What the tests of the page's looks measure, run inside the page.

(() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });

  /** Any CSS colour as [r, g, b, alpha], 0 to 1. */
  const rgba = (css) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = css;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].map((v) => v / 255);
  };
  const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const contrast = (a, b) => {
    const [high, low] = [luminance(a), luminance(b)].sort((x, y) => y - x);
    return (high + 0.05) / (low + 0.05);
  };
  const over = (top, below) => top.slice(0, 3).map((v, i) => v * top[3] + below[i] * (1 - top[3]));

  /** The colour behind an element: all backgrounds from the root down, laid over each other. */
  const behind = (node) => {
    const chain = [];
    for (let at = node; at; at = at.parentElement) chain.unshift(rgba(getComputedStyle(at).backgroundColor));
    return chain.reduce((below, top) => over(top, below), [1, 1, 1]);
  };

  const ownText = (node) =>
    [...node.childNodes].some((child) => child.nodeType === Node.TEXT_NODE && child.data.trim());

  /** Every visible text whose contrast is below what WCAG AA asks of its size. */
  const lowContrast = () => {
    const poor = [];
    for (const node of document.body.querySelectorAll("*")) {
      if (
        !ownText(node) ||
        !node.checkVisibility({ opacityProperty: true }) ||
        node.closest(".visually-hidden, noscript")
      )
        continue;
      const style = getComputedStyle(node);
      const size = parseFloat(style.fontSize);
      const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
      const back = behind(node);
      const ratio = contrast(over(rgba(style.color), back), back);
      if (ratio < (large ? 3 : 4.5))
        poor.push(`${ratio.toFixed(2)} ${node.tagName} .${node.className} "${node.textContent.slice(0, 30)}"`);
    }
    return poor;
  };

  const custom = (name) => {
    const probe = document.createElement("i");
    probe.style.color = `var(--${name})`;
    document.body.append(probe);
    const colour = rgba(getComputedStyle(probe).color).slice(0, 3);
    probe.remove();
    return colour;
  };

  return { lowContrast, contrast, custom };
})();
