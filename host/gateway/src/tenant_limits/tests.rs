//! Limits of tenants: reservations, corrections, and what strangers can do.

use std::collections::BTreeMap;

use super::*;

fn limits(text: &str) -> TenantLimits {
    let tenants: BTreeMap<String, TenantEntry> = toml::from_str(text).unwrap();
    TenantLimits::new(&tenants, 7, None).unwrap()
}

fn hash(name: &str) -> Option<u64> {
    Some(name_hash(name.as_bytes(), 7))
}

/// Reserves a part of the limits for a new request.
fn request(
    limits: &TenantLimits,
    tenant: Option<u64>,
    model: &ModelName,
    workers: &Snapshot,
) -> Result<Option<Reservation>, Box<Exceeded>> {
    let mut reservation = None;
    limits.reserve(&mut reservation, tenant, model, workers).map(|()| reservation)
}

/// Workers without adapters.
fn none() -> Snapshot {
    Snapshot::default()
}

fn model(name: &str) -> ModelName {
    ModelName::new(name)
}

#[tokio::test(start_paused = true)]
async fn l1_output_is_reserved_and_settled_with_what_was_used() {
    let limits = limits("'*' = { output_tokens_per_minute = 1000, input_tokens_per_minute = 500 }");
    let ask = || request(&limits, hash("a"), &model("m"), &none()).unwrap().unwrap();
    let mut first = ask();
    first.tokens(100, 900).unwrap();
    // L1.3
    assert_eq!(ask().tokens(1, 200).unwrap_err().kind, LimitKind::OutputTokens);
    first.used(80, 100);
    drop(first);
    // L1.4
    assert!(ask().tokens(1, 900).is_ok());
    // A request may ask for more output than a whole minute allows: it gets the minute.
    let mut greedy = request(&limits, hash("b"), &model("m"), &none()).unwrap().unwrap();
    assert!(greedy.tokens(0, u64::MAX).is_ok());
    assert_eq!(ask().tokens(501, 1).unwrap_err().kind, LimitKind::TooLarge(501));
}

#[tokio::test(start_paused = true)]
async fn l1_requests_and_concurrency_are_limited_for_each_tenant_and_model() {
    let limits = limits(
        "'*' = { requests_per_minute = 3, models = { big = { concurrency = 1 } } }\n a = { requests_per_minute = 0 }",
    );
    let ask = |tenant, name| request(&limits, hash(tenant), &model(name), &none());
    let held = ask("a", "big").unwrap().unwrap();
    // L1.2
    assert_eq!(ask("a", "big").unwrap_err().kind, LimitKind::Concurrency);
    assert!(ask("b", "big").is_ok(), "each tenant has its own");
    drop(held);
    assert!(ask("a", "big").is_ok());
    // L1.6
    assert!((0..100).all(|_| ask("a", "small").unwrap().is_none()), "0 lifts the limit of all others");
    let admitted = (0..9).filter(|_| ask("c", "small").is_ok()).count();
    // L1.1
    assert_eq!(admitted, 3);
    let nameless = (0..9).filter(|_| request(&limits, None, &model("small"), &none()).is_ok()).count();
    assert_eq!(nameless, 3, "requests without a tenant share one account");
    tokio::time::advance(Duration::from_secs(20)).await;
    assert!(ask("c", "small").is_ok() && ask("c", "small").is_err());
}

#[tokio::test(start_paused = true)]
async fn l1_a_million_names_take_bounded_memory_and_lift_no_limit() {
    let limits = limits("'*' = { requests_per_minute = 2 }\n known = { requests_per_minute = 2 }");
    let ask = |tenant: u64| request(&limits, Some(tenant), &model("m"), &none()).is_ok();
    let served = (0..1_000_000_u64).filter(|name| ask(*name) && ask(*name)).count();
    let accounts = limits.used.lock().accounts.len();
    // L1.7
    assert!(accounts <= MAX_ACCOUNTS + 1 && served <= MAX_ACCOUNTS + 2, "{accounts} {served}");
    assert!(
        request(&limits, hash("known"), &model("m"), &none()).is_ok(),
        "a listed tenant has its own account"
    );
    tokio::time::advance(Duration::from_secs(60)).await;
    assert!(ask(2_000_000), "idle accounts are forgotten");
    assert!(limits.used.lock().accounts.len() <= 2);
}

#[tokio::test(start_paused = true)]
async fn l1_a_reload_keeps_what_was_used() {
    let before = limits("'*' = { requests_per_minute = 4 }");
    (0..4).for_each(|_| drop(request(&before, hash("a"), &model("m"), &none()).unwrap()));
    let tenants: BTreeMap<String, TenantEntry> = toml::from_str("'*' = { requests_per_minute = 6 }").unwrap();
    let after = TenantLimits::new(&tenants, 7, Some(&before)).unwrap();
    let admitted = (0..9).filter(|_| request(&after, hash("a"), &model("m"), &none()).is_ok()).count();
    // L1.8
    assert_eq!(admitted, 2);
    assert!(TenantLimits::new(&BTreeMap::new(), 7, Some(&after)).is_none(), "no limits cost nothing");
}

#[tokio::test(start_paused = true)]
async fn l1_a_request_whose_model_becomes_another_is_counted_once_for_all_models() {
    let limits = limits(
        "'*' = { requests_per_minute = 3, concurrency = 9, models = { b = { requests_per_minute = 1 } } }",
    );
    let ask = || {
        let mut reservation = request(&limits, hash("a"), &model("m"), &none()).map_err(drop)?;
        limits.reserve(&mut reservation, hash("a"), &model("b"), &none()).map_err(drop)?;
        Ok::<_, ()>(reservation)
    };
    // L1.12
    let first = ask().unwrap();
    assert_eq!(first.as_ref().map(|first| first.accounts.len()), Some(2));
    assert!(ask().is_err(), "the second one for the model");
    assert!(request(&limits, hash("a"), &model("m"), &none()).is_ok(), "the third one of the tenant");
    assert!(request(&limits, hash("a"), &model("m"), &none()).is_err());
    drop(first);
    let accounts = &limits.used.lock().accounts;
    assert!(accounts.values().all(|account| account.inflight == 0));
}
