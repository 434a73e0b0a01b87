"""Which cases should a person look at? The states of an image are second opinions: refer where they disagree.

In medicine, inspection or moderation a wrong answer is worse than a referred case. `agreement` is the share of states
that give the final class, `spread` how much they differ (mutual information, nats). They are compared with plain
confidence on images of the embedded sample: which finds most errors differs from data to data, so compare on yours, and
choose the threshold on cases that you do not report on.
"""

import torch

import unstride
from unstride import sample

REFER = 0.1  # of the cases

images, labels = sample.classification_sample(120)
images, truth = sample.preprocess_classification(images), torch.as_tensor(labels)
better = unstride.enhance(sample.load_classifier(), images[:1], budget=10)
cases = better.explain(images)

plain = torch.stack([p.plain for p in cases])
final = torch.stack([p.logits for p in cases])
wrong = final.argmax(1) != truth
doubt = {
    "confidence of one forward": 1 - plain.softmax(1).amax(1),
    "confidence of the enhanced answer": 1 - final.softmax(1).amax(1),
    "agreement of the states": 1 - torch.tensor([p.agreement for p in cases]),
    "spread of the states": torch.stack([p.spread for p in cases]),
}
count = round(REFER * len(cases))
print(f"{len(cases)} cases, {int(wrong.sum())} wrong; referring {count} of them to a person")
for name, value in doubt.items():
    referred = value.argsort(descending=True, stable=True)[:count]
    caught = int(wrong[referred].sum())
    print(f"  by {name}: {caught} wrong ones are referred, {int(wrong.sum()) - caught} stay")

worst = max(cases, key=lambda p: float(p.spread))
print("the most doubtful case:", worst)
for v in worst.states:
    print(f"  {v.state}: {sample.CLASSES[int(v.logits.argmax())]}, entropy {v.criterion:.2f}")
