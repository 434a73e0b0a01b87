"""The paper's printed numbers, transcribed from its LaTeX (ECCV 2024), one line per row of its tables.

Its figures were published as images, so their numbers are not here.
"""

TTA_TOTALS = (30, 100, 150)
NON_LEARNED_TOTALS = (30, 75, 150)
FOUR = ("ResNet18", "ResNet50", "MobileNetV2", "InceptionV3")
MORE = ("ResNext50", "ShuffleNetV2", "Swin", "SwinV2")

# Method, with ours or without, then three totals for each of four models.
IMAGENET_EXPANDED = """
GPS      no  70.51 70.51 70.51 76.50 76.50 76.50 72.24 72.24 72.24 71.48 71.48 71.48
GPS      yes 70.74 70.74 70.69 76.74 76.84 76.87 72.37 72.61 72.58 71.86 72.05 72.02
ClassTTA no  69.09 68.23 66.40 75.40 74.88 73.56 70.58 69.97 67.81 70.80 70.39 70.34
ClassTTA yes 70.37 70.36 70.37 76.58 76.61 76.65 71.44 71.68 71.63 71.93 71.99 72.00
AugTTA   no  70.55 70.66 70.28 76.54 76.59 76.47 72.33 72.42 72.46 71.65 71.88 71.98
AugTTA   yes 70.75 70.79 70.74 76.76 76.84 76.89 72.41 72.62 72.58 72.09 72.24 72.24
"""
FLOWERS_EXPANDED = """
GPS      no  89.04 89.04 89.04 91.12 91.12 91.12 89.85 89.85 89.85 87.69 87.69 87.69
GPS      yes 88.93 89.20 89.19 91.05 91.02 91.17 89.90 90.10 90.05 87.95 87.93 87.79
ClassTTA no  87.97 87.81 86.39 90.84 90.19 90.06 89.41 88.00 85.54 87.10 87.41 84.81
ClassTTA yes 88.97 89.15 89.06 91.04 90.97 91.02 89.49 89.58 89.67 87.43 87.43 87.46
AugTTA   no  88.73 88.86 88.55 90.91 90.84 90.81 90.10 90.00 89.82 87.35 87.43 87.43
AugTTA   yes 89.02 89.55 89.55 91.14 90.93 90.97 90.08 90.13 90.11 87.62 87.62 87.79
"""
IMAGENET_STANDARD = """
GPS      no  70.38 70.38 70.38 76.37 76.37 76.37 72.27 72.27 72.27 71.74 71.74 71.74
GPS      yes 70.60 70.72 70.69 76.67 76.81 76.84 72.38 72.64 72.59 72.13 72.29 72.30
ClassTTA no  70.06 67.77 65.46 76.26 74.55 72.65 71.79 69.19 66.74 71.77 70.54 70.07
ClassTTA yes 70.70 70.73 70.69 76.76 76.83 76.85 72.32 72.34 72.29 72.26 72.43 72.41
AugTTA   no  70.78 70.83 70.82 76.68 76.67 76.66 72.59 72.59 72.61 72.22 72.99 73.02
AugTTA   yes 70.89 70.85 70.86 76.74 76.82 76.86 72.60 72.69 72.58 72.42 72.51 72.46
"""
FLOWERS_STANDARD = """
GPS      no  89.07 89.07 89.07 91.07 91.07 91.07 89.80 89.80 89.80 87.64 87.64 87.64
GPS      yes 89.01 89.22 89.19 91.17 91.28 91.28 89.90 90.06 90.11 87.66 87.71 87.75
ClassTTA no  88.62 87.40 83.28 90.78 89.09 86.29 89.30 87.49 84.35 87.77 86.63 83.75
ClassTTA yes 89.07 89.22 89.15 91.19 91.28 91.36 89.77 89.89 90.00 87.53 87.66 87.53
AugTTA   no  88.88 88.97 87.40 91.20 90.80 89.41 90.05 89.93 88.19 87.74 87.10 86.91
AugTTA   yes 89.10 89.23 89.15 91.13 91.28 91.28 89.92 90.10 90.11 87.61 87.75 87.79
"""
IMAGENET_MORE = """
GPS      no  78.01 78.01 78.01 70.17 70.17 70.17 81.35 81.35 81.35 81.31 81.31 81.31
GPS      yes 78.18 78.32 78.30 70.44 70.35 70.14 81.42 81.41 81.42 81.35 81.44 81.46
ClassTTA no  77.03 76.70 75.45 69.01 69.02 68.57 80.63 80.65 80.80 80.56 80.54 80.57
ClassTTA yes 78.10 78.15 78.20 70.36 70.15 70.07 81.52 81.50 81.54 81.39 81.39 81.38
AugTTA   no  78.09 78.13 78.08 70.37 70.49 70.40 81.42 81.50 81.38 81.28 81.41 81.25
AugTTA   yes 78.14 78.23 78.28 70.51 70.35 70.25 81.49 81.51 81.52 81.40 81.42 81.42
"""
EXPANDED_NON_LEARNED = """
MeanTTA  no  67.23 68.37 67.81 73.88 74.77 74.30 68.72 69.98 69.44 70.46 70.71 70.51
MaxTTA   no  66.31 66.07 65.60 71.79 71.52 71.12 68.20 67.92 67.32 64.95 65.21 64.98
-        yes 70.27 -- -- 76.54 -- -- 72.35 -- -- 71.45 -- --
"""
STANDARD_NON_LEARNED = """
MeanTTA  no  70.90 70.38 68.06 76.65 75.99 73.57 72.65 72.00 68.98 71.99 71.61 70.44
MeanTTA  yes 70.70 70.84 70.81 76.71 76.76 76.83 72.61 72.57 72.71 71.44 71.58 71.98
MaxTTA   no  70.02 69.70 68.39 76.24 75.62 72.86 72.13 71.79 70.10 71.42 69.93 67.27
MaxTTA   yes 70.24 70.45 70.46 76.49 76.51 76.66 72.33 72.43 72.54 71.10 71.33 71.76
"""

# Total, method, with ours or without; accuracy, GMACs and their multiple, ms of an image on an A6000 and its multiple.
COMPUTATION_RESNET18 = """
1   -        no  69.76 1.8   1.0   1.6   1.0
30  GPS      no  70.51 5.5   3.0   4.2   2.7
30  GPS      yes 70.74 20.8  11.4  8.9   5.7
30  ClassTTA no  69.09 54.7  30.0  43.3  27.9
30  ClassTTA yes 70.37 69.3  38.0  25.2  16.2
30  AugTTA   no  70.55 54.7  30.0  54.0  34.8
30  AugTTA   yes 70.75 69.3  38.0  31.7  20.4
100 GPS      no  70.51 5.5   3.0   4.0   2.6
100 GPS      yes 70.74 50.3  27.6  24.3  15.6
100 ClassTTA no  68.23 182.4 100.0 155.8 100.3
100 ClassTTA yes 70.36 167.7 91.9  118.8 76.5
100 AugTTA   no  70.66 182.4 100.0 141.4 91.0
100 AugTTA   yes 70.79 167.7 91.9  86.2  55.5
150 GPS      no  70.51 5.5   3.0   3.9   2.5
150 GPS      yes 70.69 76.1  41.7  39.7  25.6
150 ClassTTA no  66.40 273.6 150.0 236.4 152.1
150 ClassTTA yes 70.37 253.6 139.0 159.1 102.4
150 AugTTA   no  70.28 273.6 150.0 244.0 157.0
150 AugTTA   yes 70.74 253.6 139.0 131.6 84.7
"""
COMPUTATION_MOBILENETV2 = """
1   -        no  71.88 0.3   1.0   2.4   1.0
30  GPS      no  72.24 1.0   3.0   7.6   3.1
30  GPS      yes 72.37 3.5   10.7  11.8  4.9
30  ClassTTA no  70.58 9.8   30.0  87.0  36.0
30  ClassTTA yes 71.44 11.6  35.6  40.9  16.9
30  AugTTA   no  72.33 9.8   30.0  86.2  35.7
30  AugTTA   yes 72.41 11.7  35.6  46.0  19.1
100 GPS      no  72.24 1.0   3.0   7.4   3.1
100 GPS      yes 72.61 9.2   28.1  38.9  16.1
100 ClassTTA no  69.97 32.8  100.0 260.6 108.0
100 ClassTTA yes 71.68 30.7  93.6  140.4 58.2
100 AugTTA   no  72.42 32.8  100.0 270.9 112.3
100 AugTTA   yes 72.62 30.7  93.6  120.9 50.1
150 GPS      no  72.24 1.0   3.0   8.5   3.5
150 GPS      yes 72.58 14.6  44.5  69.5  28.8
150 ClassTTA no  67.81 49.1  150.0 481.8 199.7
150 ClassTTA yes 71.63 48.6  148.4 235.5 97.6
150 AugTTA   no  72.46 49.1  150.0 435.9 180.6
150 AugTTA   yes 72.58 48.6  148.4 246.9 102.3
"""

# Data set, with flip or without; B_ours 1, 4, 10 for each of five models.
SEGMENTATION_MODELS = ("ResNet50-FCN", "ResNet50-DeepLab", "MobileNet-FCN", "MobileNet-DeepLab", "MiT-SegFormer")
SEGMENTATION = """
cityscapes no  72.35 72.50 72.56 79.60 79.72 79.73 71.19 71.27 71.83 75.32 75.58 75.60 76.54 77.01 77.05
cityscapes yes 72.71 72.88 72.97 80.08 80.15 80.09 71.69 72.03 72.10 75.56 75.75 75.76 76.84 77.11 77.12
ade20k     no  35.94 36.12 36.20 42.72 42.77 42.81 19.55 19.57 19.56 33.92 34.01 34.09 37.41 37.68 37.67
ade20k     yes 36.31 36.46 36.50 43.02 43.07 43.06 19.72 19.72 19.73 34.18 34.20 34.28 38.03 38.33 38.28
"""

ANTIALIASED = """
ResNet18        71.67 71.74 71.88
ResNet34        74.60 74.75 74.90
ResNet50        77.41 77.43 77.53
WideResNet50    78.70 78.76 78.91
MobileNetV2-050 72.72 72.98 73.14
"""

# Accuracy and "latency" on an A6000. The captions give its unit as images per second, the headings as lower is better.
ABLATION_SEARCH = {(1, 0): (79.64, 53.46), (1, 1): (79.52, 25.06), (2, 0): (80.06, 25.84), (2, 1): (79.88, 21.21)}
ABLATION_AGGREGATION = {
    "mean": (79.38, 19.55),
    "entropy": (79.44, 19.56),
    "learned, no Align": (79.52, 20.09),
    "learned": (79.88, 21.21),
}
ABLATION_CRITERION = {
    "random": (79.80, 13.53),
    "displacement": (79.72, 12.65),
    "entropy": (79.86, 21.45),
    "learned": (79.88, 21.21),
}


def lines(text: str) -> list[list[str]]:
    """A block above -> its words, line by line."""
    return [line.split() for line in text.strip().splitlines()]


def number(word: str) -> float | None:
    """`--` is a place that the paper leaves empty."""
    return None if word == "--" else float(word)
