"""Write scikit-learn's handwritten digits as text, for the C++ tutorials: 64 pixels (0 to 16) and the label per line.

python export_digits.py digits.csv
"""

import sys

import numpy as np
from sklearn.datasets import load_digits

images, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(labels))
np.savetxt(sys.argv[1], np.column_stack([images, labels])[order], fmt="%d", delimiter=",")
