use super::*;
use crate::fleet::{EngineGroup, Fleet, Links, StepTimeSpec};
use pointsman_workers::Role;

const TRUTH: [f64; 5] = [8.0, 0.4, 0.0006, 0.05, 0.00002];

fn group(role: Role) -> EngineGroup {
    let [c0, c1, c2, c3, c4] = TRUTH;
    EngineGroup {
        blocks: Some(4_096),
        max_num_seqs: 16,
        max_batched_tokens: 512,
        request_overhead_ms: 3.0,
        step_time: StepTimeSpec::Linear { c0, c1, c2, c3, c4 },
        ..EngineGroup::new(role, 1)
    }
}

fn fleet(roles: &[Role]) -> Fleet {
    Fleet { block_tokens: 32, engines: roles.iter().map(|role| group(*role)).collect(), ..Fleet::default() }
}

fn plan() -> Design {
    design(&DesignLimits {
        burst_requests: 120,
        mix_requests: 80,
        max_concurrency: 8,
        min_prompt: 16,
        max_prompt: 1_500,
        output_tokens: 32,
        kv_tokens: 4_096 * 32,
        seed: 1,
    })
}

/// Lets the lab serve requests as if it were a real engine.
fn measured(fleet: &Fleet, mut samples: Vec<Sample>) -> Vec<Sample> {
    let predicted = predict(fleet, &samples).unwrap();
    for (sample, predicted) in samples.iter_mut().zip(predicted) {
        let predicted = predicted.unwrap();
        (sample.ttft_ms, sample.e2e_ms) = (predicted.ttft_ms, predicted.e2e_ms);
    }
    samples
}

fn sample(at_ms: f64, isl: u32, osl: u32) -> Sample {
    Sample { at_ms, isl, cached: 0, osl, ttft_ms: 0.0, e2e_ms: 0.0 }
}

fn experiments(fleet: &Fleet, plan: &Design) -> Vec<Experiment> {
    let bursts = plan.bursts.iter().map(|burst| {
        // A client sends the requests of a burst shortly one after another.
        let samples = (0..burst.requests).map(|number| sample(f64::from(number) * 0.4, burst.isl, burst.osl));
        Experiment { samples: measured(fleet, samples.collect()) }
    });
    bursts.collect()
}

fn mix(fleet: &Fleet, plan: &Design) -> Vec<Sample> {
    let mut at_ms = 0.0;
    let samples = plan.mix.iter().map(|request| {
        at_ms += 60.0 * request.pause;
        sample(at_ms, request.isl, request.osl)
    });
    measured(fleet, samples.collect())
}

#[test]
fn the_coefficients_of_a_model_are_recovered_from_its_bursts() {
    let fleet = fleet(&[Role::Aggregated]);
    let plan = plan();
    let fit = fit_engine(&experiments(&fleet, &plan), &group(Role::Aggregated), 32).unwrap();
    let found = fit.coefficients();
    assert!((found.request_overhead - 3.0).abs() < 0.02, "{found:?}");
    for (found, truth) in found.step.iter().zip(TRUTH) {
        assert!((found / truth - 1.0).abs() < 0.02, "{fit:?}");
    }
    let mut calibrated = fleet.clone();
    calibrated.engines.iter_mut().for_each(|group| fit.apply(group));
    let errors = check(&calibrated, &mix(&fleet, &plan)).unwrap();
    assert_eq!((errors.ttft.requests, errors.not_served), (80, 0));
    for errors in [errors.ttft, errors.itl, errors.e2e] {
        assert!(errors.median_percent < 1.0 && errors.pearson_r > Some(0.99), "{errors:?}");
    }
}

#[test]
fn a_model_with_a_large_bias_is_a_warning() {
    let (fleet, plan) = (fleet(&[Role::Aggregated]), plan());
    let engine = EngineMeasurements {
        role: Role::Aggregated,
        capacity: Capacity { block_tokens: 32, blocks: 4_096, max_num_seqs: 16, max_batched_tokens: 512 },
        experiments: experiments(&fleet, &plan),
        alone: Vec::new(),
    };
    let told = |slower: f64| {
        let mut mix = mix(&fleet, &plan);
        mix.iter_mut().for_each(|sample| sample.ttft_ms *= slower);
        let measured = Measurements { engines: vec![engine.clone()], mix, ..Measurements::default() };
        calibrate(&measured).unwrap().warnings.join("\n")
    };
    assert!(!told(1.0).contains("off by"), "{}", told(1.0));
    assert!(told(1.5).contains("the model's TTFT is off by -33 % on average"), "{}", told(1.5));
}

#[test]
fn outliers_and_noise_move_the_coefficients_little() {
    let fleet = fleet(&[Role::Aggregated]);
    let mut experiments = experiments(&fleet, &plan());
    for (number, sample) in experiments.iter_mut().flat_map(|one| &mut one.samples).enumerate() {
        let noise = 1.0 + 0.04 * (number as f64 * 2.399).sin();
        let hiccup = if number % 15 == 7 { 4.0 } else { 1.0 };
        let decode = (sample.e2e_ms - sample.ttft_ms) * noise * hiccup;
        sample.ttft_ms *= (2.0 - noise) * hiccup;
        sample.e2e_ms = sample.ttft_ms + decode;
    }
    let fit = fit_engine(&experiments, &group(Role::Aggregated), 32).unwrap();
    let step = fit.coefficients().step;
    assert!((step[0] / 8.0 - 1.0).abs() < 0.1 && (step[3] / 0.05 - 1.0).abs() < 0.15, "{fit:?}");
    assert!(fit.terms.iter().all(|term| term.identified));
}

#[test]
fn times_that_are_much_too_short_do_not_outweigh_the_others() {
    let fleet = fleet(&[Role::Aggregated]);
    let mut experiments = experiments(&fleet, &plan());
    for (number, sample) in experiments.iter_mut().flat_map(|one| &mut one.samples).enumerate() {
        if number % 8 == 3 {
            sample.e2e_ms = sample.ttft_ms + 0.1;
        }
    }
    let step = fit_engine(&experiments, &group(Role::Aggregated), 32).unwrap().coefficients().step;
    assert!((step[0] / 8.0 - 1.0).abs() < 0.1 && (step[3] / 0.05 - 1.0).abs() < 0.1, "{step:?}");
}

#[test]
fn what_the_probes_do_not_vary_is_fixed_at_0_and_said_so() {
    let fleet = fleet(&[Role::Aggregated]);
    let lone: Vec<Experiment> =
        experiments(&fleet, &plan()).into_iter().filter(|one| one.samples.len() == 1).collect();
    let fit = fit_engine(&lone, &group(Role::Aggregated), 32).unwrap();
    let c1 = fit.terms.iter().find(|fit| fit.term == Term::C1).unwrap();
    assert!(
        !c1.identified && c1.value.abs() < 1e-12,
        "one sequence at a time does not separate c1 from c0: {fit:?}"
    );
    assert!(fit_engine(&[], &group(Role::Aggregated), 32).is_none());
}

#[test]
fn a_request_that_hit_the_prefix_cache_is_left_out() {
    let fleet = fleet(&[Role::Aggregated]);
    let mut experiments = experiments(&fleet, &plan());
    let first = &mut experiments[0];
    let left_out = first.samples.len();
    first.samples.iter_mut().for_each(|sample| (sample.cached, sample.ttft_ms) = (16, 1.0));
    let fit = fit_engine(&experiments, &group(Role::Aggregated), 32).unwrap();
    assert_eq!(fit.left_out, left_out);
    assert!((fit.coefficients().step[0] / 8.0 - 1.0).abs() < 0.02, "{fit:?}");
}

#[test]
fn latency_and_bandwidth_of_a_link_are_recovered() {
    let links =
        Links { bytes_per_token: 65_536, gigabytes_per_second: 0.5, latency_ms: 12.0, ..Links::default() };
    let fleet = Fleet { links, ..fleet(&[Role::Prefill, Role::Decode]) };
    let lone: Vec<Sample> = [16, 60, 250, 900, 1_500]
        .into_iter()
        .flat_map(|isl| measured(&fleet, vec![sample(0.0, isl, 8)]))
        .collect();
    let without = Fleet { links: Links::default(), ..fleet.clone() };
    let (found, terms) = fit_links(&lone, &without, 65_536, &[]).unwrap();
    assert!((found.latency_ms - 12.0).abs() < 0.1, "{found:?}");
    assert!((found.gigabytes_per_second / 0.5 - 1.0).abs() < 0.02, "{found:?} {terms:?}");
    let plan = plan();
    let errors = check(&Fleet { links: found, ..without }, &mix(&fleet, &plan)).unwrap();
    assert!(errors.ttft.median_percent < 1.0 && errors.e2e.median_percent < 1.0, "{errors:?}");
}

#[test]
fn a_model_that_is_wrong_about_prompts_does_not_hide_the_link() {
    let links =
        Links { bytes_per_token: 65_536, gigabytes_per_second: 5.0, latency_ms: 12.0, ..Links::default() };
    let fleet = Fleet { links, ..fleet(&[Role::Prefill, Role::Decode]) };
    let lengths = [16, 60, 250, 900, 1_500];
    let lone: Vec<Sample> =
        lengths.into_iter().flat_map(|isl| measured(&fleet, vec![sample(0.0, isl, 8)])).collect();
    let engine = Fleet { engines: vec![group(Role::Aggregated)], ..fleet.clone() };
    let prefill: Vec<Sample> =
        lengths.into_iter().flat_map(|isl| measured(&engine, vec![sample(0.0, isl, 1)])).collect();
    // Prompts take 20 % less time than the model of the prefill engine predicts.
    let [c0, c1, c2, c3, c4] = TRUTH;
    let mut wrong = Fleet { links: Links::default(), ..fleet };
    wrong.engines[0].step_time = StepTimeSpec::Linear { c0, c1, c2, c3: c3 * 1.2, c4: c4 * 1.2 };
    let (hidden, _) = fit_links(&lone, &wrong, 65_536, &[]).unwrap();
    assert!(hidden.gigabytes_per_second > 25.0, "{hidden:?}");
    let (found, terms) = fit_links(&lone, &wrong, 65_536, &prefill).unwrap();
    assert!((found.latency_ms - 12.0).abs() < 0.5, "{found:?} {terms:?}");
    assert!((found.gigabytes_per_second / 5.0 - 1.0).abs() < 0.05, "{found:?} {terms:?}");
}
