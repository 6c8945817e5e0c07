use super::*;

const CHAT: Workload =
    Workload { shape: Shape::Chat { turns: 4 }, requests: 400, rate: 5.0, burstiness: 1.0, seed: 3 };

#[test]
fn a_workload_is_generated_equally_each_time_and_differently_by_seed() {
    assert_eq!(generate(&CHAT), generate(&CHAT));
    assert_ne!(generate(&CHAT), generate(&Workload { seed: 4, ..CHAT }));
}

#[test]
fn each_request_has_one_of_the_targets_and_is_the_same_otherwise() {
    let targets = [1, 3].map(Duration::from_secs);
    let (plain, mut trace) = (generate(&CHAT), generate(&CHAT).with_ttft_targets(&targets, CHAT.seed));
    let with = |target| move |request: &&TraceRequest| request.targets.ttft == Some(target);
    let counts = targets.map(|target| trace.requests.iter().filter(with(target)).count());
    assert!(counts.iter().sum::<usize>() == 400 && counts[0] > 150 && counts[1] > 150, "{counts:?}");
    trace.requests.iter_mut().for_each(|request| request.targets.ttft = None);
    assert_eq!(trace, plain);
    assert_eq!(plain.clone().with_ttft_targets(&[], 1), plain);
}

#[test]
fn a_turn_s_prompt_continues_that_of_the_turn_before() {
    let trace = generate(&CHAT);
    let session = trace.requests.first().and_then(|request| request.session.clone());
    let turns: Vec<_> = trace.requests.iter().filter(|request| request.session == session).collect();
    assert_eq!(turns.len(), 4);
    for pair in turns.windows(2) {
        assert!(pair[1].blocks.starts_with(&pair[0].blocks));
        assert!(pair[0].delay.is_none_or(|_| pair[1].delay.is_some()));
    }
    assert!(trace.endless_cache_hit_rate() > 0.5, "{}", trace.endless_cache_hit_rate());
}

#[test]
fn intervals_have_the_asked_mean_and_variation() {
    let mut rng = SmallRng::seed_from_u64(1);
    for burstiness in [0.25, 1.0, 4.0] {
        let values: Vec<f64> = (0..50_000).map(|_| interval(&mut rng, 10.0, burstiness)).collect();
        let mean = values.iter().sum::<f64>() / 50_000.0;
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / 50_000.0;
        let squared = variance / (mean * mean);
        assert!((mean - 0.1).abs() < 0.005, "mean {mean} at {burstiness}");
        assert!((squared / burstiness - 1.0).abs() < 0.1, "variation {squared} at {burstiness}");
    }
}

#[test]
fn shared_prompts_and_popular_documents_are_reused() {
    let shapes = [Shape::SystemPrompts { prompts: 4 }, Shape::Documents { documents: 50 }];
    for shape in shapes {
        let trace = generate(&Workload { shape, ..CHAT });
        assert_eq!(trace.requests.len(), 400);
        assert!(trace.endless_cache_hit_rate() > 0.3, "{shape:?} {}", trace.endless_cache_hit_rate());
        let fits =
            |request: &TraceRequest| request.blocks.len() as u32 >= request.input_tokens.div_ceil(BLOCK);
        assert!(trace.requests.iter().all(fits));
    }
}
