//! AS paths (RFC 4271 4.3, RFC 6793, RFC 5065 for the types of segments).

use std::fmt;

use super::wire::Reader;

/// The number that stands for one that needs four bytes, where there are only two.
pub(super) const AS_TRANS: u16 = 23456;

/// The type of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SegmentKind {
    /// In any order: the result of an aggregation.
    Set,
    /// In the order of the way.
    Sequence,
    /// A sequence within a confederation.
    ConfederationSequence,
    /// A set within a confederation.
    ConfederationSet,
}

/// A part of a path.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Segment {
    /// Its type.
    pub kind: SegmentKind,
    /// The numbers; never empty.
    pub numbers: Vec<u32>,
}

/// The autonomous systems that a route has passed, the latest first.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct AsPath(pub Vec<Segment>);

/// The most numbers in one segment on the wire.
const LONGEST_SEGMENT: usize = 255;

impl SegmentKind {
    fn number(self) -> u8 {
        match self {
            Self::Set => 1,
            Self::Sequence => 2,
            Self::ConfederationSequence => 3,
            Self::ConfederationSet => 4,
        }
    }

    fn from_number(number: u8) -> Option<Self> {
        [Self::Set, Self::Sequence, Self::ConfederationSequence, Self::ConfederationSet]
            .into_iter()
            .find(|kind| kind.number() == number)
    }

    fn is_confederation(self) -> bool {
        matches!(self, Self::ConfederationSequence | Self::ConfederationSet)
    }
}

impl AsPath {
    /// A path of one sequence.
    #[must_use]
    pub fn sequence(numbers: impl IntoIterator<Item = u32>) -> Self {
        let numbers: Vec<u32> = numbers.into_iter().collect();
        if numbers.is_empty() {
            return Self::default();
        }
        Self(vec![Segment { kind: SegmentKind::Sequence, numbers }])
    }

    /// The length for the decision: a set counts as one, confederations as nothing (RFC 4271 9.1.2.2, RFC 5065 5.3).
    #[must_use]
    pub fn length(&self) -> usize {
        self.0
            .iter()
            .map(|segment| match segment.kind {
                SegmentKind::Sequence => segment.numbers.len(),
                SegmentKind::Set => 1,
                SegmentKind::ConfederationSequence | SegmentKind::ConfederationSet => 0,
            })
            .sum()
    }

    /// The neighbouring AS: the first number, if the path starts with a sequence.
    #[must_use]
    pub fn neighbour(&self) -> Option<u32> {
        let first = self.0.iter().find(|segment| !segment.kind.is_confederation())?;
        (first.kind == SegmentKind::Sequence).then(|| first.numbers.first().copied()).flatten()
    }

    /// How often the number occurs.
    #[must_use]
    pub fn count(&self, number: u32) -> usize {
        self.numbers().filter(|other| *other == number).count()
    }

    /// All numbers, from the front.
    pub fn numbers(&self) -> impl Iterator<Item = u32> {
        self.0.iter().flat_map(|segment| segment.numbers.iter().copied())
    }

    /// Prepends a number.
    pub fn prepend(&mut self, number: u32) {
        match self.0.first_mut() {
            Some(Segment { kind: SegmentKind::Sequence, numbers }) if numbers.len() < LONGEST_SEGMENT => {
                numbers.insert(0, number);
            }
            _ => self.0.insert(0, Segment { kind: SegmentKind::Sequence, numbers: vec![number] }),
        }
    }

    /// Reads segments to the end. `None` if the type of a segment is unknown, a segment is empty, or the lengths do
    /// not fit (RFC 7606 7.2).
    pub(super) fn decode(mut bytes: Reader<'_>, four_octet: bool) -> Option<Self> {
        let mut segments = Vec::new();
        while !bytes.is_empty() {
            let kind = SegmentKind::from_number(bytes.u8()?)?;
            let count = bytes.u8().filter(|count| *count > 0)?;
            let number = |_| if four_octet { bytes.u32() } else { bytes.u16().map(u32::from) };
            segments.push(Segment { kind, numbers: (0..count).map(number).collect::<Option<_>>()? });
        }
        Some(Self(segments))
    }

    /// Writes the segments; with two bytes for each number, larger ones become [`AS_TRANS`].
    pub(super) fn encode(&self, four_octet: bool, out: &mut Vec<u8>) {
        for segment in &self.0 {
            for numbers in segment.numbers.chunks(LONGEST_SEGMENT) {
                out.extend([segment.kind.number(), numbers.len() as u8]);
                for number in numbers {
                    if four_octet {
                        out.extend(number.to_be_bytes());
                    } else {
                        out.extend(u16::try_from(*number).unwrap_or(AS_TRANS).to_be_bytes());
                    }
                }
            }
        }
    }

    /// Whether a number needs four bytes.
    pub(super) fn needs_four_octets(&self) -> bool {
        self.numbers().any(|number| number > u32::from(u16::MAX))
    }

    /// Whether there are segments of a confederation.
    pub(super) fn has_confederations(&self) -> bool {
        self.0.iter().any(|segment| segment.kind.is_confederation())
    }

    /// The path without the segments of confederations, as it leaves its confederation (RFC 5065 5.3), and as it goes into AS4_PATH
    /// (RFC 6793 3).
    #[must_use]
    pub fn without_confederations(&self) -> Self {
        Self(self.0.iter().filter(|segment| !segment.kind.is_confederation()).cloned().collect())
    }

    /// The whole path, from one of two-byte numbers and the AS4_PATH that came with it (RFC 6793 4.2.3): the front
    /// that only the first has, then the second. If AS4_PATH is longer, it is ignored.
    pub(super) fn merged(self, four: &Self) -> Self {
        let (have, theirs) = (self.length(), four.length());
        if theirs > have {
            return self;
        }
        let mut keep = have - theirs;
        let mut segments = Vec::new();
        for segment in self.0 {
            match segment.kind {
                kind if kind.is_confederation() => segments.push(segment),
                _ if keep == 0 => break,
                SegmentKind::Set => {
                    keep -= 1;
                    segments.push(segment);
                }
                _ => {
                    let taken = keep.min(segment.numbers.len());
                    keep -= taken;
                    segments.push(Segment { numbers: segment.numbers[..taken].to_vec(), ..segment });
                }
            }
        }
        let mut path = Self(segments);
        for segment in four.0.iter().filter(|segment| !segment.kind.is_confederation()) {
            match path.0.last_mut() {
                // One sequence was cut in two.
                Some(last) if last.kind == SegmentKind::Sequence && segment.kind == SegmentKind::Sequence => {
                    last.numbers.extend(&segment.numbers);
                }
                _ => path.0.push(segment.clone()),
            }
        }
        path
    }
}

/// As operators write it: `1 2 {3,4}`.
impl fmt::Display for AsPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let segments = self.0.iter().map(|segment| {
            let numbers: Vec<String> = segment.numbers.iter().map(u32::to_string).collect();
            match segment.kind {
                SegmentKind::Sequence => numbers.join(" "),
                SegmentKind::Set => format!("{{{}}}", numbers.join(",")),
                SegmentKind::ConfederationSequence => format!("({})", numbers.join(" ")),
                SegmentKind::ConfederationSet => format!("[{}]", numbers.join(",")),
            }
        });
        f.write_str(&segments.collect::<Vec<_>>().join(" "))
    }
}
