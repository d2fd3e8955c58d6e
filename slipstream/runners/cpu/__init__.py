"""CPU kernels in C, compiled at first use: packed-weight products, attention over paged caches, sampling."""
