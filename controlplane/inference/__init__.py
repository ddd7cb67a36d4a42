"""A request's body becomes a job, its tokens become an answer."""
