//! Colours of the page in a light and a dark scheme, as CSS variables.

use std::fmt::Write as _;

/// Colours of the arms on a light page, in order and then again from the first. Found by a search over 4,096
/// colours for those with the largest minimum distance, also for people with a colour vision deficiency: 0.11
/// in Oklab. Petroff's ten colours (2021) have 0.06, and Tol's `muted` has 0.05. The test below measures it.
const LIGHT: [&str; 10] = [
    "#1111ff", "#550055", "#bb4466", "#9977ee", "#6611aa", "#223300", "#00aa00", "#cc77aa", "#8855aa",
    "#884400",
];
/// Colours of the arms on a dark page, with a minimum distance of 0.12.
const DARK: [&str; 10] = [
    "#4499ff", "#dd7700", "#eeddcc", "#885588", "#88ff22", "#bb3333", "#998899", "#7733ff", "#eeaa77",
    "#aabbee",
];
/// Background, text, faint text, lines, and the backgrounds of the answer and of warnings.
const LIGHT_PAGE: [&str; 6] = ["#ffffff", "#1a1a1a", "#555555", "#d9d9d9", "#eef5fb", "#fff4d6"];
const DARK_PAGE: [&str; 6] = ["#16181c", "#e8e8e8", "#a8adb5", "#3a3f47", "#1d2a36", "#3a2f10"];
const NAMES: [&str; 6] = ["page", "text", "faint", "line", "lead", "warning"];

/// Returns the colour of the arm at a position.
pub(super) fn colour(place: usize) -> String {
    format!("var(--arm-{})", place % LIGHT.len())
}

/// Returns the CSS rules that define the variables.
pub(super) fn rules() -> String {
    let mut css = String::from(":root{color-scheme:light dark;");
    declare(&mut css, &LIGHT_PAGE, &LIGHT);
    css.push_str("}@media(prefers-color-scheme:dark){:root{");
    declare(&mut css, &DARK_PAGE, &DARK);
    css.push_str("}}");
    css
}

fn declare(css: &mut String, page: &[&str; 6], arms: &[&str; 10]) {
    for (name, value) in NAMES.iter().zip(page) {
        let _ = write!(css, "--{name}:{value};");
    }
    for (place, value) in arms.iter().enumerate() {
        let _ = write!(css, "--arm-{place}:{value};");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Rgb = [f64; 3];

    /// Returns the linear light of the three channels, 0 to 1.
    fn linear(hex: &str) -> Rgb {
        [1, 3, 5].map(|at| {
            let value = f64::from(u8::from_str_radix(&hex[at..at + 2], 16).unwrap()) / 255.0;
            if value <= 0.04045 { value / 12.92 } else { ((value + 0.055) / 1.055).powf(2.4) }
        })
    }

    fn times(matrix: [[f64; 3]; 3], rgb: Rgb) -> Rgb {
        matrix.map(|row| row.iter().zip(rgb).map(|(a, b)| a * b).sum::<f64>())
    }

    /// Matrices of what people without one kind of cones see (Machado, Oliveira, Fernandes 2009, severity 1).
    const DEFICIENCIES: [(&str, [[f64; 3]; 3]); 4] = [
        ("none", [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]),
        (
            "protanopia",
            [
                [0.152_286, 1.052_583, -0.204_868],
                [0.114_503, 0.786_281, 0.099_216],
                [-0.003_882, -0.048_116, 1.051_998],
            ],
        ),
        (
            "deuteranopia",
            [
                [0.367_322, 0.860_646, -0.227_968],
                [0.280_085, 0.672_501, 0.047_413],
                [-0.011_820, 0.042_940, 0.968_881],
            ],
        ),
        (
            "tritanopia",
            [
                [1.255_528, -0.076_749, -0.178_779],
                [-0.078_411, 0.930_809, 0.147_602],
                [0.004_733, 0.691_367, 0.303_900],
            ],
        ),
    ];

    /// Returns coordinates in Oklab (Ottosson 2020), in which distances match those that people see.
    fn oklab(rgb: Rgb) -> Rgb {
        let lms = times(
            [
                [0.412_221_470_8, 0.536_332_536_3, 0.051_445_992_9],
                [0.211_903_498_2, 0.680_699_545_1, 0.107_396_956_6],
                [0.088_302_461_9, 0.281_718_837_6, 0.629_978_700_5],
            ],
            rgb.map(|value| value.clamp(0.0, 1.0)),
        );
        times(
            [
                [0.210_454_255_3, 0.793_617_785, -0.004_072_046_8],
                [1.977_998_495_1, -2.428_592_205, 0.450_593_709_9],
                [0.025_904_037_1, 0.782_771_766_2, -0.808_675_766],
            ],
            lms.map(f64::cbrt),
        )
    }

    fn luminance(hex: &str) -> f64 {
        linear(hex).iter().zip([0.2126, 0.7152, 0.0722]).map(|(a, b)| a * b).sum()
    }

    /// Returns the ratio of contrast as WCAG 2 defines it.
    fn contrast(a: &str, b: &str) -> f64 {
        let [a, b] = [luminance(a), luminance(b)];
        (a.max(b) + 0.05) / (a.min(b) + 0.05)
    }

    #[test]
    fn ten_arms_have_ten_colours_that_everyone_can_tell_apart_on_both_pages() {
        for (palette, page) in [(LIGHT, LIGHT_PAGE[0]), (DARK, DARK_PAGE[0])] {
            for (deficiency, matrix) in DEFICIENCIES {
                let seen = palette.map(|hex| oklab(times(matrix, linear(hex))));
                for (second, b) in seen.iter().enumerate() {
                    for (first, a) in seen.iter().enumerate().take(second) {
                        let distance = a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
                        let pair = [palette[first], palette[second]];
                        assert!(distance > 0.11, "{pair:?} differ by {distance:.3}: {deficiency}");
                    }
                }
            }
            for hex in palette {
                // WCAG 2.2, 1.4.11: graphics.
                assert!(contrast(hex, page) >= 3.0, "{hex} on {page}: {:.2}", contrast(hex, page));
            }
        }
        for page in [LIGHT_PAGE, DARK_PAGE] {
            for (text, background) in [(1, 0), (2, 0), (1, 4), (1, 5)] {
                // 1.4.3: text.
                assert!(contrast(page[text], page[background]) >= 4.5, "{page:?}");
            }
        }
    }

    #[test]
    fn the_first_ten_arms_have_colours_of_their_own() {
        let colours: std::collections::BTreeSet<String> = (0..10).map(colour).collect();
        assert!(colours.len() == 10 && colour(10) == colour(0));
        let css = rules();
        for scheme in [LIGHT, DARK] {
            assert!(
                scheme.iter().enumerate().all(|(at, hex)| css.contains(&format!("--arm-{at}:{hex};"))),
                "{css}"
            );
        }
    }
}
