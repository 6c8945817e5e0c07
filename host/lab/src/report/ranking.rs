//! Ranks the arms: which one is best, by how much, and how certain that is.

use serde::Serialize;

use super::{
    ArmReport,
    figures::{Figure, Figures},
};

/// Figure that ranks the arms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum RankBy {
    /// Mean time to first token.
    TtftMean,
    /// 90th percentile of the time to first token.
    #[default]
    TtftP90,
    /// 99th percentile of the time to first token.
    TtftP99,
    /// Mean time to last token.
    E2eMean,
    /// 90th percentile of the time to last token.
    E2eP90,
    /// Requests a second that keep the SLO.
    Goodput,
}

/// An arm with its position in the ranking.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ranked {
    /// Name of the arm.
    pub label: String,
    /// Value of the figure that ranks the arms; `None` if the arm left too many requests without an answer.
    pub value: Option<Figure>,
    /// How much worse the arm is than the best arm, percent of the best arm's value; zero for the best arm.
    /// Seeds are compared in pairs, so the interval covers the differences of equal seeds.
    pub worse_percent: Option<Figure>,
    /// Mean share of the requests that were answered completely, 0 to 1.
    pub served_share: f64,
}

impl RankBy {
    /// Returns the figure's name with the unit.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::TtftMean => "mean TTFT",
            Self::TtftP90 => "p90 TTFT",
            Self::TtftP99 => "p99 TTFT",
            Self::E2eMean => "mean E2E",
            Self::E2eP90 => "p90 E2E",
            Self::Goodput => "goodput",
        }
    }

    /// Returns a value with its unit.
    #[must_use]
    pub fn shown(self, value: f64) -> String {
        match self {
            Self::Goodput => format!("{value:.3} requests/s"),
            _ => format!("{value:.1} ms"),
        }
    }

    /// Returns the figure by which an arm is ranked. The latency of a request without an answer counts as
    /// infinite, so one such request leaves a mean without a value.
    #[must_use]
    pub fn of(self, figures: &Figures) -> Option<&Figure> {
        let unserved = [&figures.shed, &figures.no_worker, &figures.failed];
        let mean = |mean| unserved.iter().all(|count| count.mean <= 0.0).then_some(mean);
        let figure = match self {
            Self::TtftMean => mean(&figures.ttft_mean)?,
            Self::TtftP90 => &figures.ttft_p90,
            Self::TtftP99 => &figures.ttft_p99,
            Self::E2eMean => mean(&figures.e2e_mean)?,
            Self::E2eP90 => &figures.e2e_p90,
            Self::Goodput => &figures.goodput,
        };
        figure.has_value().then_some(figure)
    }

    /// Whether a larger value of the figure is better.
    #[must_use]
    pub fn more_is_better(self) -> bool {
        self == Self::Goodput
    }
}

impl Ranked {
    /// States the share of the requests that the arm answered completely.
    pub(crate) fn served(&self) -> String {
        format!("answered {:.2} % of the requests", self.served_share * 100.0)
    }

    /// Whether the interval of the difference to the best arm excludes zero. `None` without a test: see
    /// [`Figure::excludes_zero`].
    #[must_use]
    pub fn is_sure(&self) -> Option<bool> {
        self.worse_percent.as_ref()?.excludes_zero()
    }

    /// Whether the arm does not differ measurably from the best arm: the interval of the difference includes
    /// zero. Without a test, whether the values are equal.
    #[must_use]
    pub fn is_tied(&self) -> bool {
        let is_worse = |worse: &Figure| worse.excludes_zero().unwrap_or(worse.mean > 0.0);
        self.worse_percent.as_ref().is_some_and(|worse| !is_worse(worse))
    }

    /// Whether the arm differs from the best arm, but by the same with every seed or with only one, so that
    /// no test is possible.
    pub(crate) fn is_untested(&self) -> bool {
        self.value.is_some() && self.is_sure().is_none() && !self.is_tied()
    }

    /// Whether the seeds differ too much to give the arm a place: no difference to the best arm was found,
    /// but the interval would hide one as large as the best arm's value.
    #[must_use]
    pub(crate) fn is_unclear(&self) -> bool {
        self.is_tied() && self.worse_percent.as_ref().is_some_and(|worse| worse.plus_minus > Some(100.0))
    }
}

/// Whether the interval of a figure is wider than its mean.
fn is_wide(figure: &Figure) -> bool {
    figure.plus_minus > Some(figure.mean)
}

/// Returns the arms of a ranking that do not differ measurably from the first.
pub(crate) fn tied(ranking: &[Ranked]) -> impl Iterator<Item = &Ranked> {
    ranking.iter().skip(1).filter(|ranked| ranked.is_tied() && !ranked.is_unclear())
}

/// Names the arms whose place the seeds do not show; `None` if they show every place.
pub(crate) fn too_few_seeds(ranking: &[Ranked], by: RankBy) -> Option<String> {
    let unclear = ranking.iter().filter(|ranked| ranked.is_unclear());
    let unclear: Vec<(&Ranked, &Figure)> =
        unclear.filter_map(|ranked| Some((ranked, ranked.value.as_ref()?))).collect();
    let seeds = unclear.first()?.1.values.len();
    let arms = unclear.iter().map(|(ranked, value)| {
        let half = by.shown(value.plus_minus.unwrap_or_default());
        format!("{} ({} ± {half})", ranked.label, by.shown(value.mean))
    });
    Some(format!(
        "too few seeds to tell where {} stands: use --seeds {}",
        arms.collect::<Vec<_>>().join(", "),
        (4 * seeds).clamp(10, 1_000)
    ))
}

/// Returns how much worse `values` are than those of `best` with equal seeds, percent of the values of
/// `best`.
pub(crate) fn worse_percent(values: &[f64], best: &[f64], more_is_better: bool) -> Figure {
    let worse = values.iter().zip(best).map(|(value, best)| {
        let difference = if more_is_better { best - value } else { value - best };
        if *best > 0.0 { difference / best * 100.0 } else { 0.0 }
    });
    Figure::of(worse.collect())
}

/// Returns the arms from best to worst, and those without a value at the end. An arm whose interval is wider
/// than its mean comes first only if the next arm with a narrower one is worse in spite of that.
pub(super) fn rank(arms: &[ArmReport], by: RankBy) -> Vec<Ranked> {
    let mut sorted: Vec<(&ArmReport, &Figure)> =
        arms.iter().filter_map(|arm| Some((arm, by.of(&arm.figures)?))).collect();
    sorted.sort_by(
        |(_, a), (_, b)| {
            if by.more_is_better() { b.mean.total_cmp(&a.mean) } else { a.mean.total_cmp(&b.mean) }
        },
    );
    let worse =
        |value: &Figure, best: &Figure| worse_percent(&value.values, &best.values, by.more_is_better());
    let wide = sorted.iter().take_while(|(_, value)| is_wide(value)).count();
    if let (Some((_, first)), Some((_, steady))) = (sorted.first(), sorted.get(wide))
        && worse(steady, first).excludes_zero() == Some(false)
        && let Some(front) = sorted.get_mut(..=wide)
    {
        front.rotate_right(1);
    }
    let best = sorted.first().map(|(_, best)| *best);
    let ranked = |arm: &ArmReport, value: Option<&Figure>| Ranked {
        label: arm.label.clone(),
        value: value.cloned(),
        worse_percent: value.zip(best).map(|(value, best)| worse(value, best)),
        served_share: arm.figures.served_share.mean,
    };
    let mut unserved: Vec<&ArmReport> = arms.iter().filter(|arm| by.of(&arm.figures).is_none()).collect();
    unserved.sort_by(|a, b| b.figures.served_share.mean.total_cmp(&a.figures.served_share.mean));
    let valued = sorted.iter().map(|(arm, value)| ranked(arm, Some(value)));
    valued.chain(unserved.into_iter().map(|arm| ranked(arm, None))).collect()
}
