def compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    assert len(data_sources) == len(extra_infos)
    return [
        {"score": float(solution.split("####")[-1].strip() == gold), "pred": solution}
        for solution, gold in zip(solution_strs, ground_truths, strict=True)
    ]
