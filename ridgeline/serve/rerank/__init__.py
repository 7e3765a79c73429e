"""Reranking: relevance of documents to a query, judged by a causal language model."""
