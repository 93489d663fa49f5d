"""Memory of workers, known before they start: `tandem plan --values`, and the chart's `fitCheck`.

    memory.py   what a worker takes of its device, and whether that fits
    nearest.py  the nearest change of a worker that does fit
    values.py   the pools of a chart's values, and the device of each
    verdict.py  a verdict on each pool, in words

Nothing here reads a model's weights or asks a GPU.
"""
