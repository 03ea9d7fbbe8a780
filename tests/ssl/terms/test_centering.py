import torch

from nestling.ssl.terms.centering import Center


def test_micro_batches_move_the_center_as_one_batch():
    logits = torch.randn(8, 5, dtype=torch.float64)
    whole, parts = Center(5).double(), Center(5).double()
    for _ in range(3):
        whole.add(logits)
        whole.update()
        for micro in logits.split(2):
            parts.add(micro)
        parts.update()
    torch.testing.assert_close(parts.center, whole.center, rtol=0, atol=1e-14)


def test_the_center_follows_the_published_recursion():
    center, expected = Center(5, momentum=0.9).double(), torch.zeros(5, dtype=torch.float64)
    for step in range(4):
        logits = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        center.add(logits)
        center.update()
        expected = expected * 0.9 + logits.mean(dim=0) * 0.1
    torch.testing.assert_close(center.center, expected, rtol=0, atol=1e-14)


def test_only_the_center_is_saved():
    assert list(Center(5).state_dict()) == ["center"]


def test_large_half_precision_logits_do_not_overflow():
    center = Center(3)
    center.add(torch.full((1024, 3), 100.0, dtype=torch.float16))
    center.update()
    torch.testing.assert_close(center.center, torch.full((3,), 10.0))
