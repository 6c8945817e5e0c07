//! Verifies tokens of an identity server (JWT), and says whom they name.

use std::{num::NonZeroU64, sync::Arc};

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD as BASE64};
use pointsman_http_client::{Pem, Roots, Setup};
use pointsman_workers::unix_time;
use quick_cache::sync::Cache;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::caller::{Caller, CallerId, Operator, Tenant};
use crate::{
    config::{JwtAlgorithm, JwtSettings, KeySource, Role},
    tasks::Tasks,
    telemetry::metrics::Metrics,
};

mod key_set;
mod public_key;
mod refresh;

pub(crate) use key_set::KeySet;
use refresh::{Fetched, Refresh};

/// Maximum length of a token, bytes.
const MAX_TOKEN: usize = 8 * 1024;
/// Maximum length of the name of a tenant in a token, bytes.
const MAX_TENANT: usize = 128;
/// Maximum length of a subject in the audit log, characters.
const MAX_SUBJECT: usize = 64;
/// Tokens that are remembered as verified.
const MAX_VERIFIED: usize = 16_384;

/// Verifies tokens.
pub(crate) struct TokenVerifier {
    settings: JwtSettings,
    /// Salt of the tenants' hashes.
    salt: u64,
    keys: Keys,
    /// Secret of the digests of tokens and subjects.
    secret: [u8; 32],
    verified: Cache<[u8; 32], Arc<Verified>>,
    _stop: DropGuard,
}

/// Source of the public keys.
enum Keys {
    Fixed(KeySet),
    Fetched(Arc<Refresh>),
}

/// Whom a valid token names.
#[derive(Debug)]
pub(crate) struct Verified {
    /// The token's holder as a client.
    pub(crate) caller: Caller,
    /// The token's holder as an operator; `None` if the token has no role.
    pub(crate) operator: Option<Operator>,
    /// When the token expires, in seconds since 1970.
    expires: u64,
    /// Version of the set with its key.
    version: u64,
}

/// Why a token is not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenError {
    /// The token is not one of the identity server: why. It may be a guess.
    Wrong(&'static str),
    /// The token is signed and not valid, or not yet, not any more or not here: why.
    Invalid(&'static str),
    /// The token is valid, and may not: why.
    MayNot(&'static str),
    /// The public keys are not known, or too old.
    NoKeys,
}

impl TokenVerifier {
    /// Starts to fetch the public keys, if they are to be fetched. `salt` is the salt of the tenant hashes.
    /// `before`: the verifier until now. Its keys serve until the first fetch if only the CA is another.
    ///
    /// # Errors
    /// The HTTP client does not start.
    pub(crate) fn start(
        settings: &JwtSettings,
        salt: u64,
        metrics: &Arc<Metrics>,
        tasks: &Tasks,
        before: Option<&Self>,
    ) -> Result<Self, String> {
        let stop = CancellationToken::new();
        let keys = match &settings.keys {
            KeySource::File(text) => Keys::Fixed(KeySet::parse(text.as_bytes())?),
            KeySource::Url { url, ca } => {
                let url: reqwest::Url = url.parse().map_err(|_| "its `jwks_url` is not a URL".to_owned())?;
                let roots = match ca {
                    Some(pem) => Roots::SystemAnd(Pem::new("auth.jwt.jwks_ca", pem.as_bytes())),
                    None => Roots::of(url.as_str()),
                };
                let client = Setup { roots, ..Setup::default() }.build();
                let client = client.map_err(|error| format!("reading the public keys: {error}"))?;
                let refresh = Arc::new(Refresh::new(
                    settings.rules.unknown_key_pause,
                    before.and_then(|before| before.keys_for(settings)),
                ));
                let run =
                    refresh.clone().run((client, url), settings.rules.refresh, metrics.clone(), stop.clone());
                tasks.spawn(run);
                Keys::Fetched(refresh)
            }
        };
        Ok(Self {
            settings: settings.clone(),
            salt,
            keys,
            secret: rand::random(),
            verified: Cache::new(MAX_VERIFIED),
            _stop: stop.drop_guard(),
        })
    }

    /// Returns whether this verifier behaves like one with these settings.
    #[must_use]
    pub(crate) fn is_of(&self, settings: &JwtSettings, salt: u64) -> bool {
        self.settings == *settings && self.salt == salt
    }

    /// Returns the set that was fetched, if it serves tokens of these settings, too.
    fn keys_for(&self, settings: &JwtSettings) -> Option<Arc<Fetched>> {
        match &self.keys {
            Keys::Fetched(refresh) if self.settings.rules == settings.rules => refresh.current(),
            _ => None,
        }
    }

    /// Verifies a token.
    ///
    /// # Errors
    /// [`TokenError`].
    pub(crate) async fn verify(&self, token: &str) -> Result<Arc<Verified>, TokenError> {
        if token.len() > MAX_TOKEN {
            return Err(TokenError::Wrong("it is longer than 8192 bytes"));
        }
        let name = self.name(token);
        let version = self.version()?;
        if let Some(known) = self.verified.get(&name)
            && known.version == version
        {
            if now() < known.expires {
                return Ok(known);
            }
            self.verified.remove(&name);
        }
        let verified = match self.verify_now(token) {
            Err(TokenError::Wrong(UNKNOWN_KEY)) => {
                let Keys::Fetched(refresh) = &self.keys else { return Err(TokenError::Wrong(UNKNOWN_KEY)) };
                if !refresh.again().await {
                    return Err(TokenError::Wrong(UNKNOWN_KEY));
                }
                self.verify_now(token)?
            }
            other => other?,
        };
        let verified = Arc::new(verified);
        self.verified.insert(name, verified.clone());
        Ok(verified)
    }

    /// The version of the set in force.
    fn version(&self) -> Result<u64, TokenError> {
        match &self.keys {
            Keys::Fixed(_) => Ok(0),
            Keys::Fetched(refresh) => {
                let set = refresh.current().ok_or(TokenError::NoKeys)?;
                if set.at.elapsed() > self.settings.rules.max_stale {
                    return Err(TokenError::NoKeys);
                }
                Ok(set.version)
            }
        }
    }

    fn verify_now(&self, token: &str) -> Result<Verified, TokenError> {
        let malformed = TokenError::Wrong("it is not a signed token");
        let (signed, signature) = token.rsplit_once('.').ok_or(malformed)?;
        let (header, claims) = signed.split_once('.').ok_or(malformed)?;
        let header: Header = decoded(header).ok_or(malformed)?;
        let algorithm =
            JwtAlgorithm::of(&header.alg).filter(|_| self.settings.rules.algorithms.contains(&header.alg));
        let algorithm =
            algorithm.ok_or(TokenError::Wrong("its algorithm is not one of auth.jwt.algorithms"))?;
        if header.crit.is_some() {
            return Err(TokenError::Wrong("it has critical extensions"));
        }
        let fetched;
        let (set, version) = match &self.keys {
            Keys::Fixed(set) => (set, 0),
            Keys::Fetched(refresh) => {
                fetched = refresh.current().ok_or(TokenError::NoKeys)?;
                (&fetched.keys, fetched.version)
            }
        };
        let mut keys = set.fitting(header.kid.as_deref(), algorithm).peekable();
        keys.peek().ok_or(TokenError::Wrong(UNKNOWN_KEY))?;
        let signature = BASE64.decode(signature).map_err(|_| malformed)?;
        if !keys.any(|key| key.verifies(algorithm, signed.as_bytes(), &signature)) {
            return Err(TokenError::Wrong("its signature is wrong"));
        }
        let claims: Map<String, Value> =
            decoded(claims).ok_or(TokenError::Invalid("its claims are not JSON"))?;
        self.check(&claims, now())?;
        self.named(&claims, version)
    }

    /// Checks times, issuer and audience.
    fn check(&self, claims: &Map<String, Value>, now: u64) -> Result<(), TokenError> {
        let skew = self.settings.rules.clock_skew.as_secs();
        let number = |name: &str| match claims.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => {
                seconds(value).map(Some).ok_or(TokenError::Invalid("`exp` or `nbf` is not a number"))
            }
        };
        let (expires, not_before) = (number("exp")?, number("nbf")?);
        let missing = TokenError::Invalid("`exp`, `iss` or `aud` is missing");
        if expires.ok_or(missing)?.saturating_add(skew) < now {
            return Err(TokenError::Invalid("it is expired"));
        }
        if not_before.is_some_and(|begin| begin > now.saturating_add(skew)) {
            return Err(TokenError::Invalid("it is not valid yet"));
        }
        if claims.get("iss").and_then(Value::as_str).ok_or(missing)? != self.settings.rules.issuer {
            return Err(TokenError::Invalid("its issuer is not auth.jwt.issuer"));
        }
        let ours = |name: &Value| self.settings.rules.audience.iter().any(|own| name.as_str() == Some(own));
        let audience = match claims.get("aud") {
            Some(Value::Array(names)) => names.iter().any(ours),
            Some(name @ Value::String(_)) => ours(name),
            _ => return Err(missing),
        };
        audience.then_some(()).ok_or(TokenError::Invalid("its audience is not one of auth.jwt.audience"))
    }

    /// Returns the user that the claims name.
    fn named(&self, claims: &Map<String, Value>, version: u64) -> Result<Verified, TokenError> {
        let expires = claims.get("exp").and_then(seconds).ok_or(TokenError::Invalid("it never expires"))?;
        let subject = claims.get("sub").and_then(Value::as_str).unwrap_or_default();
        let id = CallerId::Subject(self.hash_of_subject(subject));
        let shown: Arc<str> = subject.chars().take(MAX_SUBJECT).collect::<String>().into();
        let tenant = match self.settings.rules.tenant_claim.as_str() {
            "" => None,
            claim => {
                let name = claims.get(claim).and_then(Value::as_str).unwrap_or_default();
                if name.is_empty() || name.len() > MAX_TENANT {
                    return Err(TokenError::MayNot("it names no tenant, or one of more than 128 bytes"));
                }
                Some(Tenant::new(name, self.salt))
            }
        };
        let role = self.role(claims);
        let operator = role.map(|role| Operator { id: shown, role });
        Ok(Verified { caller: Caller { id, tenant }, operator, expires, version })
    }

    fn role(&self, claims: &Map<String, Value>) -> Option<Role> {
        let rules = &self.settings.rules;
        let claim =
            Some(&rules.role_claim).filter(|name| !name.is_empty()).and_then(|name| claims.get(name))?;
        let has = |names: &[String]| match claim {
            Value::String(one) => names.contains(one),
            Value::Array(many) => {
                many.iter().filter_map(Value::as_str).any(|one| names.iter().any(|name| name == one))
            }
            _ => false,
        };
        if has(&rules.operators) { Some(Role::Operator) } else { has(&rules.viewers).then_some(Role::Viewer) }
    }

    /// Returns a hash of the whole subject. Only this process can compute it.
    fn hash_of_subject(&self, subject: &str) -> Option<NonZeroU64> {
        let digest = Sha256::new_with_prefix(self.secret).chain_update(subject.as_bytes()).finalize();
        NonZeroU64::new(u64::from_be_bytes(*digest.first_chunk()?))
    }

    /// The name under which a token is remembered. Only this process can compute it.
    fn name(&self, token: &str) -> [u8; 32] {
        Sha256::new_with_prefix(self.secret).chain_update(token.as_bytes()).finalize().into()
    }
}

impl std::fmt::Debug for TokenVerifier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TokenVerifier").field("settings", &self.settings).finish_non_exhaustive()
    }
}

/// Returns whether a text has the form of a token: three parts, of which the first is JSON.
#[must_use]
pub(crate) fn is_token(text: &str) -> bool {
    text.starts_with("ey") && text.bytes().filter(|byte| *byte == b'.').count() == 2
}

const UNKNOWN_KEY: &str = "its key is not one of the identity server's";

/// The header of a token. It names the key; a key or an address of keys in it is ignored.
#[derive(Deserialize)]
struct Header {
    alg: String,
    kid: Option<String>,
    crit: Option<Value>,
}

fn decoded<T: DeserializeOwned>(part: &str) -> Option<T> {
    serde_json::from_slice(&BASE64.decode(part).ok()?).ok()
}

fn seconds(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| value.as_f64().filter(|seconds| *seconds >= 0.0).map(|seconds| seconds as u64))
}

fn now() -> u64 {
    unix_time().as_secs()
}
