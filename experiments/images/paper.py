"""What GPipe reports (arXiv 1811.06965, section 4 and table 4)."""

MODEL = "AmoebaNet-B(18,512), 557M parameters, images of 480×480"
IMAGENET = 0.844  # top-1 on ImageNet 2012
NUM_RUNS = 5  # of fine-tuning, whose mean is reported
TRANSFER = {  # mean accuracy after fine-tuning, with a new softmax layer
    "CIFAR-10": 0.990,
    "CIFAR-100": 0.913,
    "Stanford Cars": 0.946,
    "Oxford Pets": 0.959,
    "Food-101": 0.930,
    "FGVC Aircraft": 0.927,
    "Birdsnap": 0.836,
}
