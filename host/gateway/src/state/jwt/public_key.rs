//! A public key, and the verification of signatures with ring, the cryptography that TLS uses.

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD as BASE64};
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ECDSA_P384_SHA384_FIXED, ED25519, RSA_PKCS1_2048_8192_SHA256,
    RSA_PKCS1_2048_8192_SHA384, RSA_PKCS1_2048_8192_SHA512, RSA_PSS_2048_8192_SHA256,
    RSA_PSS_2048_8192_SHA384, RSA_PSS_2048_8192_SHA512, RsaParameters, RsaPublicKeyComponents,
    UnparsedPublicKey, VerificationAlgorithm,
};
use serde::Deserialize;

use crate::config::JwtAlgorithm;

/// A key of a set, as the identity server writes it (RFC 7517).
#[derive(Deserialize)]
pub(super) struct Jwk {
    kty: String,
    kid: Option<String>,
    #[serde(rename = "use")]
    usage: Option<String>,
    alg: Option<String>,
    crv: Option<String>,
    x: Option<String>,
    y: Option<String>,
    n: Option<String>,
    e: Option<String>,
}

/// A key that verifies signatures.
#[derive(Debug)]
pub(super) struct PublicKey {
    pub(super) id: Option<String>,
    /// The one algorithm that the set allows for this key; `None`: each that fits its kind.
    algorithm: Option<JwtAlgorithm>,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Rsa { n: Vec<u8>, e: Vec<u8> },
    P256(Vec<u8>),
    P384(Vec<u8>),
    Ed25519(Vec<u8>),
}

/// ring's verifiers.
enum Ring<'a> {
    Rsa(&'static RsaParameters, &'a [u8], &'a [u8]),
    Curve(&'static dyn VerificationAlgorithm, &'a [u8]),
}

impl PublicKey {
    /// Returns the key; `None` when it is not one that verifies signatures. A symmetric key that everyone can
    /// download proves nothing.
    pub(super) fn of(jwk: Jwk) -> Option<Self> {
        if jwk.usage.is_some_and(|usage| usage != "sig") {
            return None;
        }
        let bytes = |text: Option<String>| BASE64.decode(text?).ok();
        let point = |x: Option<String>, y: Option<String>, size: usize| {
            let (x, y) = (bytes(x)?, bytes(y)?);
            (x.len() == size && y.len() == size).then(|| [&[4], &x[..], &y[..]].concat())
        };
        let kind = match (jwk.kty.as_str(), jwk.crv.as_deref()) {
            ("RSA", _) => Kind::Rsa { n: without_zeros(bytes(jwk.n)?), e: without_zeros(bytes(jwk.e)?) },
            ("EC", Some("P-256")) => Kind::P256(point(jwk.x, jwk.y, 32)?),
            ("EC", Some("P-384")) => Kind::P384(point(jwk.x, jwk.y, 48)?),
            ("OKP", Some("Ed25519")) => Kind::Ed25519(bytes(jwk.x)?),
            _ => return None,
        };
        let algorithm = match jwk.alg {
            Some(name) => Some(JwtAlgorithm::of(&name)?),
            None => None,
        };
        Some(Self { id: jwk.kid, algorithm, kind })
    }

    /// Returns whether the key may verify signatures of an algorithm.
    pub(super) fn allows(&self, algorithm: JwtAlgorithm) -> bool {
        self.algorithm.is_none_or(|own| own == algorithm) && self.ring(algorithm).is_some()
    }

    /// Returns whether a signature of a message is right.
    pub(super) fn verifies(&self, algorithm: JwtAlgorithm, message: &[u8], signature: &[u8]) -> bool {
        match self.ring(algorithm).filter(|_| self.allows(algorithm)) {
            Some(Ring::Rsa(parameters, n, e)) => {
                RsaPublicKeyComponents { n, e }.verify(parameters, message, signature).is_ok()
            }
            Some(Ring::Curve(curve, key)) => {
                UnparsedPublicKey::new(curve, key).verify(message, signature).is_ok()
            }
            None => false,
        }
    }

    /// Returns ring's verifier for an algorithm; `None` when the key is of another kind.
    fn ring(&self, algorithm: JwtAlgorithm) -> Option<Ring<'_>> {
        Some(match (&self.kind, algorithm) {
            (Kind::Rsa { n, e }, algorithm) => Ring::Rsa(rsa(algorithm)?, n, e),
            (Kind::P256(key), JwtAlgorithm::Es256) => Ring::Curve(&ECDSA_P256_SHA256_FIXED, key),
            (Kind::P384(key), JwtAlgorithm::Es384) => Ring::Curve(&ECDSA_P384_SHA384_FIXED, key),
            (Kind::Ed25519(key), JwtAlgorithm::EdDsa) => Ring::Curve(&ED25519, key),
            _ => return None,
        })
    }
}

fn rsa(algorithm: JwtAlgorithm) -> Option<&'static RsaParameters> {
    Some(match algorithm {
        JwtAlgorithm::Rs256 => &RSA_PKCS1_2048_8192_SHA256,
        JwtAlgorithm::Rs384 => &RSA_PKCS1_2048_8192_SHA384,
        JwtAlgorithm::Rs512 => &RSA_PKCS1_2048_8192_SHA512,
        JwtAlgorithm::Ps256 => &RSA_PSS_2048_8192_SHA256,
        JwtAlgorithm::Ps384 => &RSA_PSS_2048_8192_SHA384,
        JwtAlgorithm::Ps512 => &RSA_PSS_2048_8192_SHA512,
        _ => return None,
    })
}

/// A number without leading zeros, which some servers write and ring refuses.
fn without_zeros(number: Vec<u8>) -> Vec<u8> {
    number.into_iter().skip_while(|byte| *byte == 0).collect()
}
