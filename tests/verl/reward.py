"""A reward that a random model earns some of, so that its gradients are not zero."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **rest):
    """Texts of an odd length earn."""
    return float(len(solution_str) % 2)
