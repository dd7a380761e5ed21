//! The points on a packet's way where programs are evaluated.

use tortie_api::net::Direction;

use tortie_kernel::nftables::{CmpOp, Expr, MetaKey, Verdict};

/// A point where the interface of a packet selects a program. Each slot has two maps: from interfaces to the numbers
/// of programs, and from numbers to chains.
///
/// The order is that in which closed interfaces may get their programs again: each slot after those that may have
/// settled its packets before, and pods last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Slot {
    HostUntrackedIn,
    HostUntrackedOut,
    HostPreDnat,
    HostIn,
    HostOut,
    HostForwardIn,
    HostForwardOut,
    FromWorkload,
    ToWorkload,
}

/// What a program's Allow does, and what happens to a packet at its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Stage {
    /// Allow accepts; what nothing allows is denied.
    Normal,
    /// Allow accepts; what no tier denies continues.
    Forward,
    /// Allow settles the packet for its incoming interface (policy decision 17); what no tier denies continues.
    PreDnat,
    /// The same, and the packet belongs to no connection.
    Untracked,
}

/// The bit of a packet's mark that says that the packet is settled for its incoming interface. It is the lowest bit
/// that Calico reserves (`NftablesMarkMask`, `felix/config/config_params.go`).
const SETTLED: u32 = 0x0001_0000;

impl Slot {
    /// The slots of pods.
    pub(super) const OF_PODS: [Self; 2] = [Self::ToWorkload, Self::FromWorkload];
    /// The slots of host endpoints.
    pub(super) const OF_HOSTS: [Self; 7] = [
        Self::HostUntrackedIn,
        Self::HostUntrackedOut,
        Self::HostPreDnat,
        Self::HostIn,
        Self::HostOut,
        Self::HostForwardIn,
        Self::HostForwardOut,
    ];

    /// The slot of a map from interfaces to numbers.
    pub(super) fn of_programs(map: &str) -> Option<Self> {
        Self::OF_HOSTS.into_iter().chain(Self::OF_PODS).find(|slot| slot.maps().0 == map)
    }

    /// The names of its maps: from interfaces to numbers, and from numbers to chains.
    pub(super) fn maps(self) -> (&'static str, &'static str) {
        match self {
            Self::FromWorkload => ("from-workload-program", "from-workload-chain"),
            Self::ToWorkload => ("to-workload-program", "to-workload-chain"),
            Self::HostUntrackedIn => ("host-untracked-in-program", "host-untracked-in-chain"),
            Self::HostUntrackedOut => ("host-untracked-out-program", "host-untracked-out-chain"),
            Self::HostPreDnat => ("host-prednat-program", "host-prednat-chain"),
            Self::HostIn => ("host-in-program", "host-in-chain"),
            Self::HostOut => ("host-out-program", "host-out-chain"),
            Self::HostForwardIn => ("host-forward-in-program", "host-forward-in-chain"),
            Self::HostForwardOut => ("host-forward-out-program", "host-forward-out-chain"),
        }
    }

    /// Whether the interface is the incoming or the outgoing one.
    pub(super) fn interface(self) -> MetaKey {
        match self {
            Self::FromWorkload
            | Self::HostUntrackedIn
            | Self::HostPreDnat
            | Self::HostIn
            | Self::HostForwardIn => MetaKey::InputInterface,
            Self::ToWorkload | Self::HostUntrackedOut | Self::HostOut | Self::HostForwardOut => {
                MetaKey::OutputInterface
            }
        }
    }

    /// The direction of the rules. A packet from a pod is egress.
    pub(super) fn direction(self) -> Direction {
        match self {
            Self::ToWorkload
            | Self::HostUntrackedIn
            | Self::HostPreDnat
            | Self::HostIn
            | Self::HostForwardIn => Direction::Ingress,
            Self::FromWorkload | Self::HostUntrackedOut | Self::HostOut | Self::HostForwardOut => {
                Direction::Egress
            }
        }
    }

    pub(super) fn stage(self) -> Stage {
        match self {
            Self::FromWorkload | Self::ToWorkload | Self::HostIn | Self::HostOut => Stage::Normal,
            Self::HostForwardIn | Self::HostForwardOut => Stage::Forward,
            Self::HostPreDnat => Stage::PreDnat,
            Self::HostUntrackedIn | Self::HostUntrackedOut => Stage::Untracked,
        }
    }
}

impl Stage {
    /// The letter in the names of its programs.
    pub(super) fn letter(self) -> &'static str {
        match self {
            Self::Normal => "",
            Self::Forward => "f",
            Self::PreDnat => "n",
            Self::Untracked => "t",
        }
    }

    /// The stage with whose programs it shares the chains of policies.
    pub(super) fn of_policies(self) -> Self {
        if self == Self::Forward { Self::Normal } else { self }
    }

    /// The expressions of an Allow.
    pub(super) fn allow(self) -> Vec<Expr> {
        let accept = Expr::Verdict(Verdict::Accept);
        match self {
            Self::Normal | Self::Forward => vec![accept],
            Self::PreDnat => [mark(SETTLED), vec![accept]].concat(),
            Self::Untracked => [mark(SETTLED), vec![Expr::Notrack, accept]].concat(),
        }
    }

    /// Whether a packet that nothing allows is denied.
    pub(super) fn denies_at_end(self) -> bool {
        self == Self::Normal
    }

    /// Whether a denied packet can be answered. The kernel cannot do this before connection tracking.
    pub(super) fn can_reject(self) -> bool {
        matches!(self, Self::Normal | Self::Forward)
    }
}

/// The packet is settled for its incoming interface.
pub(super) fn is_settled() -> Vec<Expr> {
    vec![
        Expr::Meta { register: 0, key: MetaKey::Mark },
        Expr::Bitwise { source: 0, destination: 0, mask: SETTLED.to_ne_bytes().into(), xor: vec![0; 4] },
        Expr::Cmp { register: 0, op: CmpOp::NotEqual, value: vec![0; 4] },
    ]
}

/// Clears the mark, which nobody else may have set.
pub(super) fn unsettle() -> Vec<Expr> {
    mark(0)
}

/// Sets Tortie's bit of the mark, or clears it, and keeps the others.
fn mark(bit: u32) -> Vec<Expr> {
    vec![
        Expr::Meta { register: 0, key: MetaKey::Mark },
        Expr::Bitwise {
            source: 0,
            destination: 0,
            mask: (!SETTLED).to_ne_bytes().into(),
            xor: bit.to_ne_bytes().into(),
        },
        Expr::SetMeta { register: 0, key: MetaKey::Mark },
    ]
}
