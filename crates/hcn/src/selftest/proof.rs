//! Whether a report proves that ACLs may name sets.

use super::{FoundLimits, HnsReport, SetAnswers};
use crate::{Feature, Version};

/// Why a text is no report of a selftest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReportError {
    /// It is no JSON of this form, or only the beginning of it.
    #[error("it cannot be read: {0}")]
    NotUnderstood(String),
    /// It has another format.
    #[error("its format is {found}, and this version of Tortie reads format {expected}", expected = HnsReport::FORMAT)]
    Format {
        /// The format that it names.
        found: String,
    },
}

/// Why a report does not prove that sets work.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotProven {
    /// The build of this Windows is not known, so no report can be of it.
    #[error("the system does not tell the build of Windows, so nobody knows whether the report is of it")]
    UnknownBuild,
    /// It is of another HNS.
    #[error("the report is of {report}, and this is {here}")]
    OtherHns {
        /// The HNS of the report.
        report: String,
        /// This HNS.
        here: String,
    },
    /// An answer is missing.
    #[error("the report does not answer {0}, which needs packets")]
    Open(&'static str),
    /// Packets have shown that sets do not do what ACLs need.
    #[error("packets have shown that {0} is not so")]
    Wrong(&'static str),
    /// Two parts of the report cannot both be true.
    #[error("the report contradicts itself: {0}")]
    Contradiction(&'static str),
}

impl NotProven {
    /// Whether the report speaks against sets, and not merely says too little.
    #[must_use]
    pub fn speaks_against(&self) -> bool {
        match self {
            Self::Wrong(_) | Self::Contradiction(_) => true,
            Self::UnknownBuild | Self::OtherHns { .. } | Self::Open(_) => false,
        }
    }
}

impl HnsReport {
    /// The format that [`run`](super::run) writes. It changes with the meaning of an answer.
    pub const FORMAT: u32 = 1;

    /// Reads a saved report.
    ///
    /// # Errors
    /// It is incomplete, has unknown members, or is of another format.
    pub fn parse(text: &str) -> Result<HnsReport, ReportError> {
        let value: serde_json::Value =
            serde_json::from_str(text).map_err(|error| ReportError::NotUnderstood(error.to_string()))?;
        // First of all: another format may have other members.
        match value.get("format") {
            Some(format) if *format == HnsReport::FORMAT => {}
            Some(format) => return Err(ReportError::Format { found: format.to_string() }),
            None => return Err(ReportError::Format { found: "missing".to_owned() }),
        }
        // From the text, because a member that occurs twice is gone from the value.
        serde_json::from_str(text).map_err(|error| ReportError::NotUnderstood(error.to_string()))
    }

    /// Whether packets have shown, on an HNS of this version in this build of Windows, that ACLs may name sets.
    ///
    /// # Errors
    /// Why they may not.
    pub fn proves_sets(&self, version: Version, build: Option<&str>) -> Result<(), NotProven> {
        let of = |version: Option<Version>, build: Option<&str>| {
            let version = version.map_or("an unknown version".to_owned(), |version| version.to_string());
            format!("HNS {version} of Windows {}", build.unwrap_or("of an unknown build"))
        };
        let build = Some(build.ok_or(NotProven::UnknownBuild)?);
        if self.version != Some(version) || self.build.as_deref() != build {
            let (report, here) = (of(self.version, self.build.as_deref()), of(Some(version), build));
            return Err(NotProven::OtherHns { report, here });
        }
        let answers = self.sets.named();
        if let Some((name, _)) = answers.iter().find(|(_, answer)| *answer == Some(false)) {
            return Err(NotProven::Wrong(name));
        }
        let has_answers = self.set_reading.is_some() || answers.iter().any(|(_, answer)| answer.is_some());
        if has_answers {
            self.check_consistency(version)?;
        }
        if self.set_reading.is_none() {
            let is_alone = answers.iter().all(|(_, answer)| answer.is_some());
            return Err(match is_alone {
                true => NotProven::Contradiction(
                    "all packets did as expected, and nobody knows what a set means (setReading)",
                ),
                false => NotProven::Open("what a set means (setReading)"),
            });
        }
        match answers.iter().find(|(_, answer)| answer.is_none()) {
            Some((name, _)) => Err(NotProven::Open(name)),
            None => Ok(()),
        }
    }

    fn check_consistency(&self, version: Version) -> Result<(), NotProven> {
        let FoundLimits { set_members, .. } = &self.limits;
        if !version.supports(Feature::SetPolicy) {
            return Err(NotProven::Contradiction("it has answers about sets of an HNS that has none"));
        }
        if self.packets_by.as_deref().is_none_or(|sender| sender.trim().is_empty()) {
            return Err(NotProven::Contradiction(
                "it has answers that need packets, and nobody has sent any (packetsBy)",
            ));
        }
        if set_members.is_none() {
            return Err(NotProven::Contradiction(
                "it has answers about sets, and no set was accepted (limits.setMembers)",
            ));
        }
        Ok(())
    }
}

impl SetAnswers {
    /// The answers by their names in the report.
    fn named(&self) -> [(&'static str, Option<bool>); 10] {
        // Exhaustive, so that an answer is not forgotten here.
        let SetAnswers {
            allows_inbound,
            allows_outbound,
            blocks_inbound,
            blocks_outbound,
            has_networks,
            matches_both_sides,
            has_ports,
            nobody_matches_nothing,
            gets_members,
            loses_members,
        } = *self;
        [
            ("sets.allowsInbound", allows_inbound),
            ("sets.allowsOutbound", allows_outbound),
            ("sets.blocksInbound", blocks_inbound),
            ("sets.blocksOutbound", blocks_outbound),
            ("sets.hasNetworks", has_networks),
            ("sets.matchesBothSides", matches_both_sides),
            ("sets.hasPorts", has_ports),
            ("sets.nobodyMatchesNothing", nobody_matches_nothing),
            ("sets.getsMembers", gets_members),
            ("sets.losesMembers", loses_members),
        ]
    }
}
