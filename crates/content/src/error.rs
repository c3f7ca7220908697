//! What can be wrong with what the other side says about contents.

/// The other side says what makes no sense.
#[derive(Debug, thiserror::Error)]
pub enum ContentError {
    /// A frame that is no frame.
    #[error("a frame of blocks that makes no sense ({0}); the sender is damaged, or of another version")]
    Frame(&'static str),
    /// A reply that is no reply.
    #[error("a reply to named blocks that makes no sense ({0}); the receiver is damaged, or of another version")]
    Reply(&'static str),
    /// A greeting that is no greeting.
    #[error("what the receiver says that it holds makes no sense ({0}); it is damaged, or of another version")]
    Greeting(&'static str),
}
