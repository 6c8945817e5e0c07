use super::*;

fn queued(number: u64, access: &Access, size: usize) -> Queued {
    let job = CompileJob {
        digest: Digest([0; 32]),
        bytes: vec![0; size].into(),
        code: Digest([0; 32]),
        is_built_in: true,
        settings: String::new(),
        settings_for: None,
        origin: Origin::Embedded,
        access: access.clone(),
    };
    Queued { job, model: Some(ModelName::new("m")), number, cancel: Cancel::default() }
}

#[test]
fn a_slot_has_one_compile_of_each_kind_at_a_time_and_large_files_leave_a_thread() {
    let slots: Vec<Access> = (0..4).map(|_| Access::default()).collect();
    let mut jobs = Jobs::default();
    let large = MAX_SMALL_BYTES + 1;
    let order = [(0, large), (0, 1), (0, 1), (1, large), (2, large), (3, 1)];
    for (number, (slot, size)) in (0..).zip(order) {
        jobs.waiting.push_back(queued(number, &slots[slot], size));
    }
    let mut taken = Vec::new();
    while let Some(queued) = jobs.take() {
        taken.push(queued.number);
    }
    // Not 2, whose slot is busy, and not 4, the third large one.
    assert_eq!(taken, [0, 1, 3, 5]);
    jobs.running.iter().for_each(|running| running.cancel.cancel());
    assert_eq!(jobs.take().map(|queued| queued.number), Some(2), "its slot's other one was cancelled");
}

#[test]
fn n7_files_of_slots_without_a_model_are_first() {
    let slots: Vec<Access> = (0..5).map(|_| Access::default()).collect();
    let mut jobs = Jobs::default();
    for (number, of) in (0..).zip([0, 1, 2, 3, 2, 4]) {
        let model = (of < 2).then(|| ModelName::new("m"));
        jobs.waiting.push_back(Queued { model, ..queued(number, &slots[of], 1) });
    }
    let taken: Vec<u64> = std::iter::from_fn(|| jobs.take()).map(|queued| queued.number).collect();
    // N7.29: 4 is the second one of its slot
    assert_eq!(taken, [2, 3, 5, 0, 1]);
}

#[test]
fn n7_models_take_turns() {
    let slots: Vec<Access> = (0..6).map(|_| Access::default()).collect();
    let mut jobs = Jobs::default();
    // Three slots of `a` with two files each, and one slot of `b` and of `c`.
    let order = [(0, "a"), (0, "a"), (1, "a"), (1, "a"), (2, "a"), (2, "a"), (4, "b"), (5, "c"), (5, "c")];
    for (number, (slot, model)) in (0..).zip(order) {
        let model = Some(ModelName::new(model));
        jobs.waiting.push_back(Queued { model, ..queued(number, &slots[slot], 1) });
    }
    let mut taken = Vec::new();
    while let Some(queued) = jobs.take() {
        taken.push(queued.number);
        // One thread.
        jobs.running.clear();
    }
    // N7.29
    assert_eq!(taken, [0, 6, 7, 1, 8, 2, 3, 4, 5]);
}
