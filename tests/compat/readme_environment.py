"""The environment in Gymformer's README, copied without changes."""

import random

import gymnasium as gym
from gymnasium import spaces
from transformers import AutoTokenizer


# Create a text summarization environment
class SummarizationEnv(gym.Env):
    def __init__(self, model_name):
        super().__init__()
        self.tokenizer = AutoTokenizer.from_pretrained(model_name)

        # Define action and observation spaces
        self.action_space = spaces.Discrete(len(self.tokenizer))
        self.observation_space = spaces.Sequence(spaces.Discrete(len(self.tokenizer)))

        # Sample articles to summarize
        self.articles = [
            "Scientists have discovered a new species of deep-sea fish...",
            "The economic outlook suggests inflation will continue to decrease...",
        ]

    def reset(self, *, seed=None, options=None):
        # Choose a random article
        article_idx = random.randint(0, len(self.articles) - 1)
        self.current_article = self.articles[article_idx]

        # Initial prompt includes the article and a summarization instruction
        prompt = f"Article: {self.current_article}\n\nWrite a concise summary:"
        self.state = self.tokenizer.encode(prompt)
        self.prompt_len = len(self.state)

        # Also create reference summary for reward calculation
        self.reference_summary = self._get_reference_summary(article_idx)

        return self.state, {"article": self.current_article}

    def step(self, action):
        # Update state with the new token
        self.state.append(action)
        generated_text = self.tokenizer.decode(self.state[self.prompt_len :])

        # End episode if stop token generated or max length reached
        done = (action == self.tokenizer.eos_token_id) or (len(generated_text) > 100)

        # Simple reward: Increasing for brevity, plus bonus for using key terms
        reward = 0
        if done:
            # Length reward: shorter is better (after minimum useful length)
            summary_len = len(generated_text.split())
            if summary_len >= 10:
                reward += max(0, 1.0 - (summary_len / 50))

            # Key terms reward
            key_terms = self._extract_key_terms(self.current_article)
            for term in key_terms:
                if term.lower() in generated_text.lower():
                    reward += 0.2

        return self.state, reward, done, False, {"summary": generated_text}

    def _get_reference_summary(self, article_idx):
        # Would contain reference summaries in a real implementation
        references = [
            "New deep-sea fish discovered with unique adaptations.",
            "Economic reports predict continued decline in inflation rates.",
        ]
        return references[article_idx]

    def _extract_key_terms(self, article):
        # Simplified extraction of important terms
        # In a real implementation, this would use NLP techniques
        if "species" in article:
            return ["species", "fish", "deep-sea", "discovered"]
        else:
            return ["economic", "inflation", "decrease"]
