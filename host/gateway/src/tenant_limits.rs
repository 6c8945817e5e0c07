//! Limits of each tenant, over all models and for single ones (L1): requests, input and output tokens a
//! minute, and requests in flight. A request reserves the most that it may need when it is admitted. When it
//! ends, the reservation is replaced by its real usage.

use std::{collections::HashMap, fmt, sync::Arc};

use parking_lot::Mutex;
use pointsman_workers::{ModelName, Snapshot, name_hash};
use tokio::time::{Duration, Instant};

mod bucket;
#[cfg(test)]
mod tests;

use crate::{
    config::{ALL_TENANTS, TenantEntry, TenantModelEntry},
    openai::rate_limit::{Exceeded, LimitKind, RateHeaders, Tightest},
};
use bucket::Bucket;

/// Accounts that are kept. A client can name any number of tenants.
const MAX_ACCOUNTS: usize = 16_384;
/// Shortest time between two searches for idle accounts, when all are taken.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);
/// The tenant that further ones share while all accounts are taken.
const OTHER_TENANTS: u64 = u64::MAX;
/// The tenant of requests without one.
const NO_TENANT: u64 = u64::MAX - 1;

/// Tenant of the limit, and its model; `None` stands for all.
type AccountId = (u64, Option<ModelName>);

/// Limits of one configuration, and what tenants used.
#[derive(Clone)]
pub(crate) struct TenantLimits {
    rules: Arc<Rules>,
    /// Usage by tenant. It survives a reload.
    used: Arc<Mutex<Used>>,
}

#[derive(Debug, PartialEq)]
struct Rules {
    tenants: HashMap<u64, TenantRules>,
    others: TenantRules,
}

/// Limits of a tenant: over all models, and for single ones.
#[derive(Clone, Debug, Default, PartialEq)]
struct TenantRules {
    all: Limits,
    models: HashMap<ModelName, Limits>,
}

/// 0: no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Limits {
    requests: u64,
    input: u64,
    output: u64,
    concurrency: u64,
}

#[derive(Debug, Default)]
struct Used {
    accounts: HashMap<AccountId, Account>,
    swept: Option<Instant>,
}

#[derive(Clone, Copy, Debug)]
struct Account {
    requests: Bucket,
    input: Bucket,
    output: Bucket,
    inflight: u64,
}

/// Reservation of a request. Dropping it corrects the reservation.
pub(crate) struct Reservation {
    limits: TenantLimits,
    accounts: Vec<(AccountId, Limits)>,
    /// Input and output tokens that were reserved.
    reserved: (u64, u64),
    used: (u64, u64),
}

impl TenantLimits {
    /// Returns the limits of a configuration, `None` without any. `before` is what is in force, so that
    /// what tenants used stays counted.
    #[must_use]
    pub(crate) fn new<'a>(
        tenants: impl IntoIterator<Item = (&'a String, &'a TenantEntry)> + Clone,
        salt: u64,
        before: Option<&Self>,
    ) -> Option<Self> {
        let all = tenants.clone().into_iter().find(|(name, _)| *name == ALL_TENANTS);
        let all = all.map(|(_, entry)| entry.clone()).unwrap_or_default();
        let listed = tenants.into_iter().filter(|(name, _)| *name != ALL_TENANTS);
        let listed =
            listed.map(|(name, entry)| (name_hash(name.as_bytes(), salt), TenantRules::of(&entry.or(&all))));
        let rules = Rules { tenants: listed.collect(), others: TenantRules::of(&all) };
        if rules.others.is_empty() && rules.tenants.values().all(TenantRules::is_empty) {
            return None;
        }
        let used = before.map_or_else(Arc::default, |before| before.used.clone());
        Some(Self { rules: Arc::new(rules), used })
    }

    /// Counts a request of a tenant as one in flight. One for an adapter counts for its model, too. A request
    /// that was counted for another model before is counted for the limits that it did not reserve.
    ///
    /// # Errors
    /// [`Exceeded`]: which limit, and when to try again.
    pub(crate) fn reserve(
        &self,
        reservation: &mut Option<Reservation>,
        tenant: Option<u64>,
        model: &ModelName,
        workers: &Snapshot,
    ) -> Result<(), Box<Exceeded>> {
        let rules = tenant.and_then(|tenant| self.rules.tenants.get(&tenant)).unwrap_or(&self.rules.others);
        if rules.is_empty() {
            return Ok(());
        }
        let tenant = tenant.unwrap_or(NO_TENANT);
        let models = std::iter::once(model).chain(workers.parent_of(model));
        let of_model = |model| Some(((tenant, Some(ModelName::clone(model))), *rules.models.get(model)?));
        let of_all = ((tenant, None), rules.all);
        let mut accounts: Vec<(AccountId, Limits)> =
            std::iter::once(of_all).chain(models.filter_map(of_model)).collect();
        let before = reservation.as_ref().map_or_else(Default::default, |before| before.accounts.as_slice());
        let is_reserved = |id: &AccountId| before.iter().any(|(reserved, _)| reserved.1 == id.1);
        accounts.retain(|(id, limits)| *limits != Limits::default() && !is_reserved(id));
        if accounts.is_empty() {
            return Ok(());
        }
        let now = Instant::now();
        let mut used = self.used.lock();
        for (id, _) in &mut accounts {
            used.open(id, &self.rules, now);
        }
        used.check(&accounts, |limits, account| account.next_request(limits, now))?;
        for (id, _) in &accounts {
            if let Some(account) = used.accounts.get_mut(id) {
                account.requests.withdraw(1.0);
                account.inflight += 1;
            }
        }
        drop(used);
        let empty = || Reservation { limits: self.clone(), accounts: vec![], reserved: (0, 0), used: (0, 0) };
        reservation.get_or_insert_with(empty).accounts.extend(accounts);
        Ok(())
    }
}

impl Reservation {
    /// Reserves tokens: those of the prompt, and the most that the output may have.
    ///
    /// # Errors
    /// [`Exceeded`]: which limit, and when to try again.
    pub(crate) fn tokens(&mut self, input: u64, output: u64) -> Result<(), Box<Exceeded>> {
        let now = Instant::now();
        let mut used = self.limits.used.lock();
        used.check(&self.accounts, |limits, account| account.next_tokens(limits, input, output, now))?;
        for (id, limits) in &self.accounts {
            if let Some(account) = used.accounts.get_mut(id) {
                account.input.withdraw(clamped(input, limits.input));
                account.output.withdraw(clamped(output, limits.output));
            }
        }
        self.reserved = (input, output);
        Ok(())
    }

    /// Returns whether any of the limits counts tokens.
    #[must_use]
    pub(crate) fn counts_tokens(&self) -> bool {
        self.accounts.iter().any(|(_, limits)| limits.input > 0 || limits.output > 0)
    }

    /// States the tokens that the request really used.
    pub(crate) fn used(&mut self, input: u64, output: u64) {
        self.used = (input, output);
    }

    /// Returns the limits with the smallest share left, for headers.
    #[must_use]
    pub(crate) fn headers(&self) -> RateHeaders {
        self.limits.used.lock().headers(&self.accounts, Instant::now())
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut used = self.limits.used.lock();
        for (id, limits) in &self.accounts {
            let Some(account) = used.accounts.get_mut(id) else { continue };
            account.inflight = account.inflight.saturating_sub(1);
            for (bucket, reserved, real, limit) in [
                (&mut account.input, self.reserved.0, self.used.0, limits.input),
                (&mut account.output, self.reserved.1, self.used.1, limits.output),
            ] {
                if limit > 0 {
                    bucket.correct(number(real) - clamped(reserved, limit), number(limit));
                }
            }
        }
    }
}

impl Used {
    /// Opens an account unless it is open. While all are taken, the tenant gets the one that others share.
    fn open(&mut self, id: &mut AccountId, rules: &Rules, now: Instant) {
        if self.accounts.contains_key(id) {
            return;
        }
        let is_full = |used: &Self| used.accounts.len() >= MAX_ACCOUNTS;
        let listed = rules.tenants.contains_key(&id.0);
        if is_full(self)
            && self.swept.is_none_or(|swept| now.saturating_duration_since(swept) >= SWEEP_INTERVAL)
        {
            self.swept = Some(now);
            self.accounts.retain(|id, account| !account.is_idle(rules.of(id), now));
        }
        // The number of listed tenants is the operator's.
        if is_full(self) && !listed {
            id.0 = OTHER_TENANTS;
        }
        self.accounts.entry(id.clone()).or_insert(Account {
            requests: Bucket::new(now),
            input: Bucket::new(now),
            output: Bucket::new(now),
            inflight: 0,
        });
    }

    /// Refuses a request that any of its accounts does not allow.
    fn check(
        &mut self,
        accounts: &[(AccountId, Limits)],
        refusal: impl Fn(Limits, &mut Account) -> Option<(LimitKind, u64, Duration)>,
    ) -> Result<(), Box<Exceeded>> {
        for (id, limits) in accounts {
            let refused = self.accounts.get_mut(id).and_then(|account| refusal(*limits, account));
            if let Some((kind, limit, retry_after)) = refused {
                let headers = self.headers(accounts, Instant::now());
                let model = id.1.as_ref().map(ToString::to_string);
                return Err(Box::new(Exceeded { kind, limit, model, retry_after, headers }));
            }
        }
        Ok(())
    }

    fn headers(&mut self, accounts: &[(AccountId, Limits)], now: Instant) -> RateHeaders {
        let mut headers = RateHeaders::default();
        for (id, limits) in accounts {
            let Some(account) = self.accounts.get_mut(id) else { continue };
            let tell = |tightest: &mut Tightest, limit: u64, bucket: &mut Bucket| {
                if limit > 0 {
                    let (remaining, reset) = bucket.left(number(limit), now);
                    tightest.consider_limit(limit, remaining, reset);
                }
            };
            tell(&mut headers.requests, limits.requests, &mut account.requests);
            tell(&mut headers.tokens, limits.input, &mut account.input);
            tell(&mut headers.tokens, limits.output, &mut account.output);
        }
        headers
    }
}

impl Account {
    fn next_request(&mut self, limits: Limits, now: Instant) -> Option<(LimitKind, u64, Duration)> {
        if limits.concurrency > 0 && self.inflight >= limits.concurrency {
            return Some((LimitKind::Concurrency, limits.concurrency, Duration::from_secs(1)));
        }
        let wait = wait(&mut self.requests, 1, limits.requests, now)?;
        Some((LimitKind::Requests, limits.requests, wait))
    }

    fn next_tokens(
        &mut self,
        limits: Limits,
        input: u64,
        output: u64,
        now: Instant,
    ) -> Option<(LimitKind, u64, Duration)> {
        if limits.input > 0 && input > limits.input {
            // It never fits; the time is only there for clients that insist.
            return Some((LimitKind::TooLarge(input), limits.input, Duration::from_secs(60)));
        }
        let of_input = wait(&mut self.input, input, limits.input, now);
        let of_input = of_input.map(|wait| (LimitKind::InputTokens, limits.input, wait));
        if of_input.is_some() {
            return of_input;
        }
        let wait = wait(&mut self.output, output, limits.output, now)?;
        Some((LimitKind::OutputTokens, limits.output, wait))
    }

    fn is_idle(&mut self, limits: Limits, now: Instant) -> bool {
        let idle = |bucket: &mut Bucket, limit| limit == 0 || bucket.is_idle(number(limit), now);
        self.inflight == 0
            && idle(&mut self.requests, limits.requests)
            && idle(&mut self.input, limits.input)
            && idle(&mut self.output, limits.output)
    }
}

impl Rules {
    fn of(&self, (tenant, model): &AccountId) -> Limits {
        let rules = self.tenants.get(tenant).unwrap_or(&self.others);
        model.as_ref().map_or(rules.all, |model| rules.models.get(model).copied().unwrap_or_default())
    }
}

impl TenantRules {
    fn of(entry: &TenantEntry) -> Self {
        let models = entry.models.iter().map(|(name, limits)| (ModelName::new(name), Limits::of(*limits)));
        Self { all: Limits::of(entry.limits()), models: models.collect() }
    }

    fn is_empty(&self) -> bool {
        self.all == Limits::default() && self.models.values().all(|limits| *limits == Limits::default())
    }
}

impl Limits {
    fn of(entry: TenantModelEntry) -> Self {
        let or_none = |limit: Option<u64>| limit.unwrap_or(0);
        Self {
            requests: or_none(entry.requests_per_minute),
            input: or_none(entry.input_tokens_per_minute),
            output: or_none(entry.output_tokens_per_minute),
            concurrency: or_none(entry.concurrency),
        }
    }
}

/// Returns how long `amount` has to wait; `None` if it need not.
fn wait(bucket: &mut Bucket, amount: u64, limit: u64, now: Instant) -> Option<Duration> {
    if limit == 0 {
        return None;
    }
    Some(bucket.wait(number(amount), number(limit), now)).filter(|wait| !wait.is_zero())
}

/// Amount to reserve of a limit. A request may ask for more output than a whole minute allows.
fn clamped(amount: u64, limit: u64) -> f64 {
    if limit == 0 { 0.0 } else { number(amount.min(limit)) }
}

#[expect(clippy::cast_precision_loss, reason = "a limit needs no more precision")]
fn number(amount: u64) -> f64 {
    amount as f64
}

impl fmt::Debug for TenantLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TenantLimits").field("rules", &self.rules).finish_non_exhaustive()
    }
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reservation").field("reserved", &self.reserved).finish_non_exhaustive()
    }
}
