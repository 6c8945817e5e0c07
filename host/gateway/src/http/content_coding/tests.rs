use proptest::prelude::*;

use super::*;
use crate::budget::Budget;

/// `hello` 13 times, by Google's encoder.
const BROTLI: &[u8] = b"\x1b\x40\x00\xf8\xa5\xcb\xd0\xd8\xde\xc4\x3b\x51\x80\x49\x0d";

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn coding_of(values: &[&'static str]) -> Result<Option<Coding>, String> {
    let mut headers = HeaderMap::new();
    for value in values {
        headers.append(header::CONTENT_ENCODING, value.parse().unwrap());
    }
    Coding::of(&headers).map_err(|error| error.to_string())
}

/// Decodes a body that arrives in parts of `part` bytes. Returns what was counted, too.
async fn decoded(coding: Coding, body: &[u8], part: usize, limit: usize) -> (Result<Bytes, ApiError>, usize) {
    let budget = Budget::new(1 << 30);
    let mut held = budget.share();
    let work = async {
        let mut decoder = Decoder::new(coding, limit)?;
        for part in body.chunks(part) {
            decoder.decode(part, &mut held).await?;
        }
        decoder.finish(&mut held)
    };
    let result = work.await;
    (result, held.amount())
}

#[test]
fn a_body_has_one_coding_or_none() {
    for values in [&[][..], &[""], &["identity"], &["Identity, "], &["identity", ","]] {
        assert_eq!(coding_of(values), Ok(None), "{values:?}");
    }
    for value in ["gzip", "GZIP", "x-gzip", " gzip ,", "identity, gzip"] {
        assert_eq!(coding_of(&[value]), Ok(Some(Coding::Gzip)), "{value:?}");
    }
    assert_eq!(coding_of(&["zstd"]), Ok(Some(Coding::Zstd)));
    assert_eq!(coding_of(&["Br"]), Ok(Some(Coding::Brotli)));
    for values in [&["deflate"][..], &["gzip, br"], &["gzip", "gzip"], &["gzip;q=1"], &["aes128gcm"]] {
        let error = coding_of(values).unwrap_err();
        assert!(error.contains(&format!("`{}`", values.join(", "))), "{error}");
    }
}

#[tokio::test]
async fn each_coding_is_decoded_and_its_faults_are_told() {
    let text = b"hello".repeat(13);
    let zstd = zstd::bulk::compress(&text, 3).unwrap();
    for (coding, body) in
        [(Coding::Gzip, gzip(&text)), (Coding::Zstd, zstd), (Coding::Brotli, BROTLI.to_vec())]
    {
        for part in [1, 7, 1_000] {
            let (result, held) = decoded(coding, &body, part, text.len()).await;
            assert_eq!((result.unwrap(), held), (Bytes::from(text.clone()), text.len()), "{coding:?}");
        }
        let too_large = decoded(coding, &body, 1_000, text.len() - 1).await.0;
        assert_eq!(too_large, Err(ApiError::PayloadTooLarge(text.len() - 1)), "{coding:?}");
        let with_more = [&body[..], b"more of it"].concat();
        for wrong in [&body[..body.len() - 1], &body[..3], &with_more, b"{\"model\":\"m\"}", b""] {
            let error = decoded(coding, wrong, 1_000, 1_000).await.0.unwrap_err();
            assert_eq!(error.code(), "unsupported_content_coding", "{coding:?}, {wrong:?}");
            assert!(error.to_string().contains(&format!("not valid `{}`", coding.name())), "{error}");
        }
    }
}

#[tokio::test]
async fn several_members_and_frames_are_one_body() {
    let members = [gzip(b"ab"), gzip(b""), gzip(b"c")].concat();
    assert_eq!(decoded(Coding::Gzip, &members, 5, 3).await.0.unwrap(), "abc");
    let frame = |bytes| zstd::bulk::compress(bytes, 3).unwrap();
    let frames = [frame(&b"ab"[..]), frame(b""), frame(b"c")].concat();
    assert_eq!(decoded(Coding::Zstd, &frames, 5, 3).await.0.unwrap(), "abc");
}

#[tokio::test]
async fn zeros_behind_the_last_member_are_padding() {
    for (padding, members) in [(1, 1), (7, 1), (512, 2), (5_000, 3)] {
        let body = [gzip(b"ab").repeat(members), vec![0; padding]].concat();
        for part in [1, 9, 4_096] {
            // I11.5
            let (result, held) = decoded(Coding::Gzip, &body, part, 100).await;
            assert_eq!((result.unwrap(), held), (Bytes::from("ab".repeat(members)), 2 * members));
        }
        let more = [&body[..], &gzip(b"c")].concat();
        let error = decoded(Coding::Gzip, &more, 9, 100).await.0.unwrap_err();
        assert_eq!(error.code(), "unsupported_content_coding", "{error}");
    }
    let cut = gzip(b"ab");
    decoded(Coding::Gzip, &[&cut[..cut.len() - 3], &[0; 2]].concat(), 9, 100).await.0.unwrap_err();
    decoded(Coding::Gzip, &[0; 20], 9, 100).await.0.unwrap_err();
}

#[tokio::test]
async fn a_zstd_window_above_that_of_http_is_refused() {
    let mut encoder = zstd::stream::Encoder::new(Vec::new(), 1).unwrap();
    encoder.window_log(24).unwrap();
    encoder.write_all(&[b'a'; 100_000]).unwrap();
    let frame = encoder.finish().unwrap();
    let error = decoded(Coding::Zstd, &frame, 1_000, 1_000_000).await.0.unwrap_err();
    assert!(error.to_string().contains("not valid `zstd`"), "{error}");
}

proptest! {
    #[test]
    fn any_bytes_end_within_the_limit(
        bytes in proptest::collection::vec(any::<u8>(), 0..600),
        part in 1_usize..50,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        for coding in [Coding::Gzip, Coding::Zstd, Coding::Brotli] {
            let (result, held) = runtime.block_on(decoded(coding, &bytes, part, 1_000));
            prop_assert!(held <= 1_000);
            prop_assert!(result.is_err() || result.is_ok_and(|body| body.len() <= 1_000));
        }
    }
}
