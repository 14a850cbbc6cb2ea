"""What the papers say, as data: each with the place where it says so. Nothing here is this project's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Said:
    """A figure or a finding of a paper. `low` and `high`: the range that it gives, equal where it is one figure."""

    where: str
    what: str
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}"


def _one(where: str, what: str, value: float) -> Said:
    return Said(where, what, value, value)


# TensorOpt, table 3: seconds of frontier tracking for 16 GPUs, on 48 cores.
TRACKING = {
    "wide_resnet_tensoropt": {"ldp": 1292.0, "elimination": 19_666.0, "one thread": 17_432.0},
    "rnn_tensoropt": {"ldp": 0.28, "elimination": 1.78, "one thread": 0.40},
    "transformer_tensoropt": {"ldp": 201.0, "elimination": 3030.0, "one thread": 1535.0},
}
# The project's own targets for the same, in seconds.
TRACKING_TARGETS = {"wide_resnet_tensoropt": 60.0, "rnn_tensoropt": 0.3, "transformer_tensoropt": 20.0}

# TensorOpt, section 5.1: RNN data parallel on 16 GPUs, "109 GB memory and 39 seconds per iteration".
RNN_DATA_PARALLEL = {"memory": 109e9, "time": 39.0}

# TensorOpt, section 5.1 (figure 7 b).
RDMA = _one("TensorOpt, 5.1", "seconds at the turning point, without RDMA / with four times its bandwidth", 2.0)

# OptCNN, section 6.1 (figure 7): speedup over one GPU on 16, of layer-wise parallelism and of the best other; and the most that
# layer-wise parallelism gains over the others.
OPTCNN_SCALING = {"alexnet": (12.2, 6.1), "vgg16": (14.8, 10.2), "inception_v3": (15.5, 11.2)}
OPTCNN_GAIN = {"alexnet": 2.2, "vgg16": 1.5, "inception_v3": 1.4}
# OptCNN, section 6.1 (figure 8): what one weird trick sends less than data and model parallelism; and OptCNN less than that.
OPTCNN_SENT = (
    Said("OptCNN, 6.1", "OWT against data and model parallelism", 1.1, 23.0),
    Said("OptCNN, 6.1", "OptCNN against OWT", 1.2, 2.5),
)
# OptCNN, table 3: seconds of the search for 4 GPUs.
OPTCNN_SECONDS = {"lenet5": 0.01, "alexnet": 0.02, "vgg16": 0.1, "inception_v3": 0.4}

# OptCNN, table 5: VGG-16 on 4 GPUs of a node, products by products.
OPTCNN_VGG = (
    *("conv n=4 c=1 h=1 w=1",) * 10,
    *("conv n=1 c=1 h=2 w=2",) * 3,
    *("dense n=1 c=4",) * 2,
    "dense n=1 c=2",
)

# FlexFlow, section 8.1.1 (figure 6): over data parallelism and experts, of all but ResNet-101, where it is data parallelism.
FLEXFLOW_GAIN = Said("FlexFlow, 8.1.1", "FlexFlow against the better of data parallelism and experts", 1.3, 3.3)
# FlexFlow, figure 7: NMT on 64 K80: time and bytes against the others; task computation against data parallelism.
FLEXFLOW_NMT = (
    Said("FlexFlow, figure 7", "seconds of a step, others / FlexFlow", 1.7, 2.4),
    Said("FlexFlow, figure 7", "bytes sent, others / FlexFlow", 2.0, 5.5),
    _one("FlexFlow, figure 7", "computation, FlexFlow / data parallelism", 0.8),
)
# FlexFlow, section 8.4 (figure 12): Inception-v3 on 4 P100, against data parallelism.
FLEXFLOW_INCEPTION = {
    "synchronized": _one("FlexFlow, 8.4", "bytes that synchronize parameters, of data parallelism's", 0.25),
    "time": _one("FlexFlow, 8.4", "seconds of a step, of data parallelism's", 0.88),
}
# FlexFlow, section 8.4 (figure 13): NMT on 4 P100, by words in the names of the layers.
FLEXFLOW_LAYERS = {
    "table": "on one GPU, so that nothing is synchronized",
    "layers": "layers at the same time, and each split",
    "attention": "layers at the same time, and each split",
    "softmax": "split in parameters",
}
# FlexFlow, section 8.1.3 (figure 9): over OptCNN on 16 P100, where the graphs are no chains (Inception-v3, RNNTC, RNNLM, NMT).
FLEXFLOW_NO_CHAINS = ("inception_v3", "rnntc", "rnnlm", "nmt")
FLEXFLOW_OPTCNN = Said("FlexFlow, 8.1.3", "OptCNN / FlexFlow", 1.2, 1.6)
# FlexFlow, table 5: seconds of the search with delta simulation, by GPUs.
FLEXFLOW_SECONDS = {
    "alexnet": {4: 0.04, 16: 0.48, 64: 5.9},
    "resnet101": {4: 0.4, 16: 7.3, 64: 158.0},
    "inception_v3": {4: 4.1, 16: 77.0, 64: 1278.0},
    "rnntc": {4: 7.5, 16: 170.0, 64: 1489.0},
    "rnnlm": {4: 9.2, 16: 121.0, 64: 969.0},
    "nmt": {4: 16.0, 16: 328.0, 64: 2190.0},
}

# Unity, section 6.2 (figure 14): over the best existing approach, at any number of GPUs.
UNITY_GAIN = {
    "resnext50_unity": 1.0,
    "bert_large": 1.0,
    "dlrm_summit": 3.6,
    "candle_uno": 1.6,
    "inception_v3_unity": 1.3,
    "mlp_unity": 2.0,
    "xdl": 1.9,
}
UNITY_JOINT = _one("Unity, 6.4 (figure 15b)", "sequential / joint, at most", 1.4)
# Unity, section 6.3 (figure 15a): BERT-Large, speedup over data and model parallelism as dimensions are added.
UNITY_DIMENSIONS = {
    "data+model": 1.0,
    "data+model+reduction": 1.0,
    "data+model+reduction+heads": 1.2,
    "data+model+reduction+heads+pipeline": 1.4,
}
# Unity, section 6.1: seconds of the search on 192 GPUs, at most.
UNITY_SECONDS = {"inception_v3_unity": 1200.0} | dict.fromkeys(set(UNITY_GAIN) - {"inception_v3_unity"}, 600.0)
