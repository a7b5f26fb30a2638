//! Whose a limit is.

/// Each of what has a limit. Budgets nest: a guest's lies inside its session's, that inside its user's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// A guest, or the component that it is made of.
    Guest,
    /// A connection.
    Session,
    /// A user, over all its connections and guests.
    User,
    /// All users together.
    Daemon,
}

impl Scope {
    /// From the innermost to the outermost.
    pub const ALL: [Self; 4] = [Self::Guest, Self::Session, Self::User, Self::Daemon];

    /// Its name; that of its budget in the configuration.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Guest => "guest",
            Self::Session => "session",
            Self::User => "user",
            Self::Daemon => "daemon",
        }
    }

    /// That of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|scope| scope.name() == name)
    }

    /// Whose the fields of [`GuestLimits`](crate::guest::GuestLimits) are.
    pub(super) fn of_guest_limits(field: &str) -> Option<Self> {
        Some(match field {
            "memory_bytes"
            | "n_memories"
            | "n_tables"
            | "n_table_elements"
            | "n_instances"
            | "component_bytes"
            | "compile_ms"
            | "compile_memory_bytes"
            | "compiled_bytes"
            | "cpu_ms"
            | "deadline_ms"
            | "idle_ms"
            | "n_handles"
            | "call_bytes"
            | "argument_bytes"
            | "n_contexts"
            | "host_bytes"
            | "constraint_bytes"
            | "constraint_symbols"
            | "constraint_states"
            | "constraint_mask_ms"
            | "constraint_compile_ms"
            | "constraint_memory_bytes"
            | "n_pages"
            | "n_tokens"
            | "output_bytes_in_flight"
            | "log_bytes"
            | "recording_bytes"
            | "n_messages"
            | "inbox_bytes" => Self::Guest,
            "n_guests_per_user" | "process_memory_bytes" => Self::User,
            "n_compiles" | "n_compiles_queued" | "n_programs" | "program_bytes" | "cache_bytes"
            | "n_guests" => Self::Daemon,
            _ => return None,
        })
    }

    /// Whose the fields of [`SessionLimits`](crate::session::SessionLimits) are.
    pub(super) fn of_session_limits(field: &str) -> Option<Self> {
        Some(match field {
            "detached_bytes" | "detached_kept_bytes" | "detached_idle_ms" | "detached_ended_ms" => {
                Self::Guest
            }
            "upload_idle_ms"
            | "n_requests"
            | "message_bytes"
            | "waiting_message_bytes"
            | "hello_ms"
            | "stop_ms" => Self::Session,
            "n_connections"
            | "n_connections_per_s"
            | "n_uploads"
            | "n_uploads_waiting"
            | "n_detached"
            | "n_detached_ended" => Self::User,
            "drain_ms" => Self::Daemon,
            _ => return None,
        })
    }

    /// Whose the fields of [`HttpSettings`](crate::config::HttpSettings) are.
    pub(super) fn of_http(field: &str) -> Option<Self> {
        match field {
            "body_bytes" | "read_ms" | "write_ms" => Some(Self::Session),
            "n_connections" => Some(Self::User),
            _ => None,
        }
    }

    /// Whose the fields of [`PolicySettings`](crate::guest::PolicySettings) are.
    pub(super) fn of_policy(field: &str) -> Option<Self> {
        match field {
            "memory_bytes" | "call_ms" | "reply_bytes" | "log_bytes" => Some(Self::Guest),
            "load_ms" => Some(Self::Daemon),
            _ => None,
        }
    }

    /// Whose the fields at the top of the configuration are, of those that are limits.
    pub(super) fn of_sizes(field: &str) -> Option<Self> {
        match field {
            "saved_disk_bytes_per_user" => Some(Self::User),
            "kv_bytes" | "kv_host_bytes" | "model_bytes" | "model_resident_ms" | "model_wait_ms"
            | "n_step_tokens" | "n_step_rows" | "log_bytes" | "saved_disk_bytes" => Some(Self::Daemon),
            _ => None,
        }
    }
}
